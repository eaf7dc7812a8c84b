"""The arguments of the script; the names of Varuna's flags are built in a loop."""

import argparse
import functools


@functools.cache
def get_args():
    parser = argparse.ArgumentParser()
    add_training(parser)
    add_varuna(parser)
    args = parser.parse_args()
    if args.varuna:
        for name in ("stage_to_rank_map", "chunk_size"):
            assert getattr(args, name) is not None, f"{name} argument is None"
    return args


def add_training(parser):
    group = parser.add_argument_group(title="training")
    group.add_argument("--batch-size", type=int, default=8)
    group.add_argument("--local_rank", type=int, default=None)
    group.add_argument("--train-iters", type=int, default=4)
    group.add_argument("--clip-grad", type=float, default=0.5)
    group.add_argument("--min-scale", type=float, default=1)
    group.add_argument("--save", default=None)
    group.add_argument("--load", default=None)


def add_varuna(parser):
    group = parser.add_argument_group(title="varuna")
    for name, kind in {"stage_to_rank_map": str, "chunk_size": int, "rank": int, "resume_step": int}.items():
        group.add_argument(f"--{name}", type=kind, default=None)
    group.add_argument("--varuna", action="store_true")
