"""The training loop: with Varuna or in one process."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from language.arguments import get_args
from language.model import LENGTH, VOCABULARY
from varuna import Varuna, get_this_rank_config_varuna, get_varuna_config

CKPT_AND_STOP = False


def on_demand_checkpoint():
    global CKPT_AND_STOP
    CKPT_AND_STOP = True


def make_data(samples=64):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator))


def wrap(model, get_batch_fn):
    args = get_args()
    _, replicas = get_varuna_config(args.stage_to_rank_map)
    return Varuna(
        model,
        args.stage_to_rank_map,
        get_batch_fn,
        args.batch_size * replicas,
        args.chunk_size,
        False,
        local_rank=args.local_rank,
        device="cpu",
        shared_weights=[("word_embeddings.weight", "lm_head_weight")],
    )


def loader_of(data):
    args = get_args()
    replicas, replica = 1, 0
    if args.varuna:
        _, replicas = get_varuna_config(args.stage_to_rank_map)
        _, replica = get_this_rank_config_varuna(args.stage_to_rank_map, args.rank)
    sampler = DistributedSampler(data, num_replicas=replicas, rank=replica, shuffle=False)
    return iter(DataLoader(data, batch_size=args.batch_size, sampler=sampler))


def pretrain(model_provider, forward_step, get_batch, varuna_step, varuna_evaluate):
    args = get_args()
    torch.manual_seed(0)
    data = make_data()
    model = model_provider(separate_head=args.varuna)
    if args.varuna:
        model = wrap(model, lambda size, device=None: get_batch(iter(DataLoader(data, size)), device=device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if args.varuna:
        model.set_optimizer(optimizer, init_loss_scale=2**17, min_loss_scale=args.min_scale)
    unwrapped = model.model if args.varuna else model
    while hasattr(unwrapped, "module"):
        unwrapped = unwrapped.module
    assert not hasattr(unwrapped, "init_state_dict_from_bert")
    iteration, iterator = 0, loader_of(data)
    if args.varuna and args.load is not None and args.resume_step is not None:
        model.load_checkpoint(args.load, args.resume_step)
        iteration = args.resume_step
        for _ in range(iteration):
            next(iterator)
    train(model, optimizer, iteration, iterator, varuna_step if args.varuna else forward_step)
    evaluate(model, loader_of(data), varuna_evaluate if args.varuna else forward_step)


def train(model, optimizer, iteration, iterator, step):
    args = get_args()
    while iteration < args.train_iters:
        overflow, norm = False, 0.0
        if args.varuna:
            _, reduced, overflow, norm = step(iterator, model)
        else:
            loss, reduced = step(iterator, model)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad).item()
        if not overflow:
            optimizer.step()
        model.zero_grad()
        iteration += 1
        if not args.rank:
            print(f"step {iteration} loss {reduced['lm loss'].item():.6f} norm {norm:.5f}", flush=True)
        if args.save is not None and args.varuna and (CKPT_AND_STOP or iteration == 2):
            future = model.checkpoint(args.save, tempdir=None, step=iteration)
            if future is not None and args.rank == 0:
                Path(args.save, "latest_checkpointed_iteration.txt").write_text(str(iteration))
            if CKPT_AND_STOP:
                exit()


def evaluate(model, iterator, step):
    args = get_args()
    model.eval()
    with torch.no_grad():
        _, reduced = step(iterator, model)
    model.train()
    if not args.rank:
        print(f"evaluation loss {reduced['lm loss'].item():.6f}", flush=True)
