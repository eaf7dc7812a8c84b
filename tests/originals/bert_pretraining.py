"""Pretrains a small BERT, with `--varuna` as a script for the original Varuna does it."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from varuna import CutPoint, Varuna, get_this_rank_config_varuna, get_varuna_config

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, MASKED = 30, 8, 16, 2, 3, 3


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids, token_type_ids):
        positions = torch.arange(input_ids.size(1), device=input_ids.device).unsqueeze(0).expand_as(input_ids)
        summed = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        return self.norm(summed + self.token_type_embeddings(token_type_ids))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden, mask):
        def heads(x):
            return x.view(x.size(0), x.size(1), HEADS, -1).transpose(1, 2)

        scores = heads(self.query(hidden)) @ heads(self.key(hidden)).transpose(-1, -2) / 8**0.5
        mixed = torch.softmax(scores + mask, dim=-1) @ heads(self.value(hidden))
        mixed = mixed.transpose(1, 2).reshape(hidden.shape)
        hidden = self.first_norm(hidden + self.out(mixed))
        return self.second_norm(hidden + self.narrow(F.gelu(self.wide(hidden))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.cutpoints = nn.ModuleList([CutPoint() for _ in range(LAYERS - 1)])

    def forward(self, hidden, mask):
        for i, layer in enumerate(self.layer):
            hidden = layer(hidden, mask)
            if i < len(self.cutpoints):
                hidden = self.cutpoints[i](hidden)
        return hidden


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder, self.pooler = Embeddings(), Encoder(), nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids, token_type_ids, attention_mask):
        mask = attention_mask.unsqueeze(1).unsqueeze(2)
        mask = (1.0 - mask.to(dtype=next(iter(self.parameters())).dtype)) * -10000.0
        hidden = self.encoder(self.embeddings(input_ids, token_type_ids), mask)
        return hidden, torch.tanh(self.pooler(hidden[:, 0]))


class BertWithLoss(nn.Module):
    """Two losses; the weight of the words is two parameters with one memory, as the original asks for."""

    def __init__(self):
        super().__init__()
        self.bert = Bert()
        self.decoder = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.decoder.weight = nn.Parameter(self.bert.embeddings.word_embeddings.weight)
        self.next_sentence = nn.Linear(WIDTH, 2)

    def forward(self, input_ids, token_type_ids, attention_mask, masked_lm_labels, next_sentence_labels):
        hidden, pooled = self.bert(input_ids, token_type_ids, attention_mask)
        words = F.cross_entropy(
            self.decoder(hidden).view(-1, VOCABULARY), masked_lm_labels.view(-1), ignore_index=-1
        )
        return words + F.cross_entropy(self.next_sentence(pooled).view(-1, 2), next_sentence_labels.view(-1))


def make_data(samples):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    masked = torch.rand(samples, LENGTH, generator=generator).argsort(1) < MASKED  # as many in each sample
    labels = torch.where(masked, tokens, -1)
    types = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(samples, LENGTH).contiguous()
    attention = torch.ones(samples, LENGTH, dtype=torch.long)
    attention[::3, -2:] = 0
    sentences = torch.randint(2, (samples,), generator=generator)
    return TensorDataset(tokens.masked_fill(masked, 0), types, attention, labels, sentences)


def to_dict(batch, device=None):
    names = "input_ids", "token_type_ids", "attention_mask", "masked_lm_labels", "next_sentence_labels"
    return dict(zip(names, batch if device is None else [tensor.to(device) for tensor in batch], strict=True))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--init_loss_scale", type=int, default=2**20)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--varuna", action="store_true")
    parser.add_argument("--stage_to_rank_map", default=None, type=str)
    parser.add_argument("--chunk_size", type=int, default=None)
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--rank", type=int, default=-1)
    return parser.parse_args()


def main():
    args = parse()
    device = torch.device("cpu")
    if args.varuna:
        torch.distributed.init_process_group(backend="gloo", init_method="env://")
        args.train_batch_size = args.batch_size
    torch.manual_seed(0)
    data = make_data(64)
    model = BertWithLoss()
    replicas, replica = 1, 0
    if args.varuna:

        def get_batch_fn(size, device=None):
            return to_dict(next(iter(DataLoader(data, batch_size=size))), device=device)

        _, replicas = get_varuna_config(args.stage_to_rank_map)
        _, replica = get_this_rank_config_varuna(args.stage_to_rank_map, args.rank)
        shared = [("bert.embeddings.word_embeddings.weight", "decoder.weight")]
        model = Varuna(
            model,
            args.stage_to_rank_map,
            get_batch_fn,
            args.train_batch_size * replicas,
            args.chunk_size,
            fp16=False,
            device=device,
            shared_weights=shared,
        )
    else:
        model.decoder.weight = model.bert.embeddings.word_embeddings.weight
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    others = [p for n, p in model.named_parameters() if "norm" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )
    if args.varuna:
        model.set_optimizer(optimizer, loss_scale="dynamic", init_loss_scale=args.init_loss_scale)
    sampler = DistributedSampler(data, num_replicas=replicas, rank=replica, shuffle=False)
    loader = DataLoader(data, batch_size=args.train_batch_size, sampler=sampler)
    for step, batch in enumerate(loader):
        if step == args.max_steps:
            break
        batch = to_dict(batch, device=device)
        overflow = False
        if args.varuna:
            loss, overflow, grad_norm = model.step(batch, with_norm=True)
            loss = torch.tensor(loss)
        else:
            loss = model(**batch)
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
        if not overflow:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        if args.rank <= 0:
            print(f"step {step} loss {loss.item():.6f} norm {grad_norm:.5f}", flush=True)
    if args.varuna:
        model.checkpoint(args.output_dir, tempdir=None, step=args.max_steps)
        assert Path(args.output_dir, f"varuna_ckpt_{args.max_steps}").exists()


if __name__ == "__main__":
    main()
