"""Bytes that must move, and products that must be done."""

import torch
from torch import nn

from benchmarks.case import Task
from benchmarks.work import LARGEST_COPY, copied_bytes, count_flops, moved_bytes, weights_of


def test_inputs_and_outputs_count_once_each() -> None:
    x = torch.ones(4, 8)

    assert moved_bytes(Task(lambda a, b: (a + b).sum(0), (x, x)), torch.ones(8)) == 4 * (32 + 8)


def test_a_training_step_moves_tangent_and_gradients_too() -> None:
    x = torch.ones(10, requires_grad=True)
    task = Task(lambda a: a * 2, (x,), (x,), tangent=torch.ones(10))

    assert moved_bytes(task, task.step(task.program)) == 4 * 40


def test_what_is_written_in_place_is_read_and_written() -> None:
    x = torch.ones(10)

    assert moved_bytes(Task(lambda a: a.add_(1), (x,), written=(x,)), None) == 4 * 20


def test_a_task_may_say_what_moves() -> None:
    assert moved_bytes(Task(lambda: None, moved=7), torch.ones(8)) == 7


def test_a_table_that_is_looked_up_in_is_not_read() -> None:
    module = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 2))

    assert sum(weight.numel() for weight in weights_of(module)) == 4 * 2 + 2


def test_a_table_that_is_also_a_weight_is_read() -> None:
    module = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 100, bias=False))
    module[1].weight = module[0].weight

    assert sum(weight.numel() for weight in weights_of(module)) == 400


def test_flops_of_products_are_counted_through_the_backward() -> None:
    linear = nn.Linear(8, 16, bias=False)
    x = torch.ones(4, 8, requires_grad=True)
    forward = 2 * 4 * 8 * 16

    assert count_flops(Task(linear, (x,))) == forward
    both = Task(linear, (x,), (x, linear.weight), tangent=torch.ones(4, 16))
    assert count_flops(both) == 3 * forward


def test_flops_inside_of_an_lstm_are_seen() -> None:
    cell = nn.LSTM(4, 8)
    step = 2 * (4 + 8) * 4 * 8

    assert count_flops(Task(cell, (torch.ones(3, 1, 4),))) == 3 * step


def test_a_copy_is_of_the_size_of_the_row_within_bounds() -> None:
    assert copied_bytes(0) == 8
    assert copied_bytes(1001) == 1000
    assert copied_bytes(1 << 40) == LARGEST_COPY
