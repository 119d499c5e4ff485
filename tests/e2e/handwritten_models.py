"""Networks written out in full: recurrent, convolutional, graph, expert and recommender."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Recurrent(nn.Module):
    """A two-layer recurrent encoder, both directions, with a linear head on every step."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.encoder = kind(6, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, sequence: Tensor) -> Tensor:
        steps, _ = self.encoder(sequence)
        return self.head(steps)


class LSTMCellLoop(nn.Module):
    """An LSTM written as a Python loop over steps, so that the capture unrolls it."""

    def __init__(self, inputs: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.gates = nn.Linear(inputs + hidden, 4 * hidden)
        self.hidden = hidden

    def forward(self, sequence: Tensor) -> tuple[Tensor, Tensor]:
        state = sequence.new_zeros(sequence.shape[0], self.hidden)
        memory = torch.zeros_like(state)
        outputs = []
        for step in sequence.unbind(1):
            keep, write, read, value = self.gates(torch.cat([step, state], 1)).chunk(4, 1)
            memory = memory * keep.sigmoid() + write.sigmoid() * value.tanh()
            state = read.sigmoid() * memory.tanh()
            outputs.append(state)
        return torch.stack(outputs, 1), memory


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(outputs))

    def forward(self, image: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(image)), inplace=True)
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(image), inplace=True)


class ResNet(nn.Module):
    """Stem, three residual stages, global pooling and a classifier."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        self.stages = nn.Sequential(
            ResidualBlock(width, width, 1),
            ResidualBlock(width, 2 * width, 2),
            ResidualBlock(2 * width, 4 * width, 2),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, image: Tensor) -> Tensor:
        features = self.stages(self.stem(image))
        return self.head(F.adaptive_avg_pool2d(features, 1).flatten(1))


class UNet(nn.Module):
    """One level down, one level up by transposed convolution, and a skip connection."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = self._double_conv(3, width)
        self.bottom = self._double_conv(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge = self._double_conv(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _double_conv(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.SiLU(),
        )

    def forward(self, image: Tensor) -> Tensor:
        wide = self.down(image)
        deep = self.bottom(F.max_pool2d(wide, 2))
        return self.head(self.merge(torch.cat([self.up(deep), wide], 1)))


class GraphSum(nn.Module):
    """Message passing: messages along edges are added at their target with `index_add`."""

    def __init__(self, features: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(features, hidden)
        self.message = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(2))
        self.update = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(2))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        state = self.embed(nodes)
        for message, update in zip(self.message, self.update, strict=True):
            sent = F.relu(message(torch.cat([state[source], state[target]], 1)))
            received = torch.zeros_like(state).index_add(0, target, sent)
            state = state + torch.tanh(update(torch.cat([state, received], 1)))
        return state


class GraphAttention(nn.Module):
    """Edge softmax by `scatter_reduce` (amax, sum), then a mean and a maximum over neighbours."""

    def __init__(self, features: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(features, hidden)
        self.score = nn.Linear(2 * hidden, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edges
        state = self.project(nodes)
        count = state.shape[0]
        score = F.leaky_relu(self.score(torch.cat([state[source], state[target]], 1)))[:, 0]
        floor = score.new_full((count,), -1e4)
        highest = floor.scatter_reduce(0, target, score, "amax")
        weight = torch.exp(score - highest[target])
        total = weight.new_zeros(count).scatter_reduce(0, target, weight, "sum")
        sent = state[source] * (weight / total[target])[:, None]
        where = target[:, None].expand_as(sent)
        summed = torch.zeros_like(state).scatter_add(0, where, sent)
        mean = torch.zeros_like(state).scatter_reduce(
            0, where, state[source], "mean", include_self=False
        )
        return summed, mean


class DenseExperts(nn.Module):
    """Top-k routing in which every expert sees every token: nothing depends on the data's shape."""

    def __init__(self, width: int = 8, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.chosen = chosen

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(tokens)
        weight, expert = logits.softmax(-1).topk(self.chosen, -1)
        row = torch.arange(tokens.shape[0]).unsqueeze(1)
        gates = torch.zeros_like(logits).index_put((row, expert), weight / weight.sum(-1, True))
        inner = F.silu(torch.einsum("td,edh->eth", tokens, self.up))
        outputs = torch.einsum("eth,ehd->etd", inner, self.down)
        balance = (gates.mean(0) * logits.softmax(-1).mean(0)).sum()
        return torch.einsum("te,etd->td", gates, outputs), balance


class SparseExperts(nn.Module):
    """Top-k routing that sends each expert its own tokens: sizes depend on the data."""

    def __init__(self, width: int = 8, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )
        self.chosen = chosen

    def forward(self, tokens: Tensor) -> Tensor:
        weight, expert = self.router(tokens).softmax(-1).topk(self.chosen, -1)
        mixed = torch.zeros_like(tokens)
        # Written out, not a loop: Dynamo gives up a whole frame that breaks inside a loop.
        mixed = self.add_expert(0, mixed, tokens, weight, expert)
        mixed = self.add_expert(1, mixed, tokens, weight, expert)
        mixed = self.add_expert(2, mixed, tokens, weight, expert)
        return self.add_expert(3, mixed, tokens, weight, expert)

    def add_expert(
        self, index: int, mixed: Tensor, tokens: Tensor, weight: Tensor, expert: Tensor
    ) -> Tensor:
        row, slot = torch.where(expert == index)
        return mixed.index_add(0, row, self.experts[index](tokens[row]) * weight[row, slot, None])


class TransformerBlock(nn.Module):
    """Pre-norm self-attention and a feed-forward network, each added to what came in."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        split = self.mix(self.norm1(tokens)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.out(attended.transpose(1, 2).flatten(2))
        return tokens + self.feed(self.norm2(tokens))


class Recommender(nn.Module):
    """Embedding bags and a bottom network, their pairwise dot products, and a top network."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in (11, 7))
        self.mean_bag = nn.EmbeddingBag(5, width, mode="mean")
        self.bottom = nn.Sequential(nn.Linear(6, width), nn.ReLU())
        pairs = torch.tril_indices(4, 4, offset=-1)
        self.register_buffer("left", pairs[0])
        self.register_buffer("right", pairs[1])
        self.top = nn.Sequential(nn.Linear(width + 6, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, dense: Tensor, first: Tensor, second: Tensor, offsets: Tensor) -> Tensor:
        low = self.bottom(dense)
        features = [low, self.bags[0](first, offsets), self.bags[1](second)]
        features.append(self.mean_bag(second % 5))
        stacked = torch.stack(features, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.left, self.right]
        return torch.sigmoid(self.top(torch.cat([low, products], 1)))
