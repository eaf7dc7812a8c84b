"""Checkpoints that know no layout: complete or not there at all, and loadable into any other.

    part.py      what a file holds: tensors under their original names, in safetensors' form
    manifest.py  what a checkpoint is: one JSON document with every size and hash, written last
    store.py     where it lies: a local folder, or anything that fsspec opens
    save.py      parts, then the manifest; old ones away
    load.py      the newest complete one; just the bytes that are asked for, checked
    want.py      what one rank takes from it, and what it refuses
    courier.py   a process of its own that saves a snapshot while training goes on; background.py hands it one
    tree.py      states of optimizers and schedulers as JSON and tensors, without pickle
    transfer.py  out to a state_dict or safetensors, and in from them

Listing and verifying need no torch: part, manifest, store, save and load import none.
"""
