"""Checkpoints that fit any layout. Each is either complete or does not exist.

    format/            the files: tensors in safetensors files, and a manifest with every size and hash
    store/             the places: a local folder, S3, or a URL that fsspec opens
    save.py            write the parts, then the manifest; remove old checkpoints
    load.py            find the newest complete checkpoint; read and check the requested bytes
    select.py          choose what one rank loads
    background.py      save while training continues, through writer_process.py
    transfer.py        export to a state_dict or safetensors, and import from them

Listing and verifying do not import torch.
"""
