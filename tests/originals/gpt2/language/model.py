"""A GPT-2 whose layers compute in the order (sequence, batch, hidden)."""

import torch
import torch.nn.functional as F
from torch import nn

from varuna import CutPoint

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 20, 8, 16, 2, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden, mask):
        sequence, batch, _ = hidden.size()
        mixed = self.query_key_value(self.norm(hidden)).view(sequence, batch, HEADS, 3 * WIDTH // HEADS)
        query, key, value = mixed.permute(1, 2, 0, 3).chunk(3, dim=-1)
        scores = torch.matmul(query, key.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5
        context = torch.softmax(scores.masked_fill(mask, -10000.0), dim=-1) @ value
        hidden = hidden + self.dense(context.permute(2, 0, 1, 3).reshape(sequence, batch, WIDTH))
        return hidden + self.narrow(F.gelu(self.wide(self.second_norm(hidden)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.cutpoints = nn.ModuleList([CutPoint() for _ in range(LAYERS - 1)])
        self.final_norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden, mask):
        if hidden is not None and hidden.dim() >= 2:
            hidden = hidden.transpose(0, 1).contiguous()
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, mask)
            if index < LAYERS - 1:
                hidden = self.cutpoints[index](hidden)
        return self.final_norm(hidden.transpose(0, 1).contiguous())


class Gpt2(nn.Module):
    """The head is a parameter of its own with the memory of the embedding, as the original asks for."""

    def __init__(self, separate_head=False):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.transformer = Transformer()
        shared = self.word_embeddings.weight
        self.lm_head_weight = nn.Parameter(shared) if separate_head else shared

    def forward(self, input_ids, position_ids, attention_mask, labels=None, loss_mask=None):
        hidden = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        logits = F.linear(self.transformer(hidden, attention_mask), self.lm_head_weight)
        if labels is None:
            return logits
        losses = F.cross_entropy(logits.view(-1, VOCABULARY).float(), labels.view(-1), reduction="none")
        if loss_mask is not None:
            loss_mask = loss_mask.view(-1)
            return torch.sum(losses * loss_mask) / loss_mask.sum()
        return losses.mean()
