"""DP-FedAvg: every site takes steps of DP-SGD by Opacus with noise of its own, and a server averages the weights.

Each site keeps (epsilon, delta) for its records by itself, over all rounds. ``benchmarks.sites`` calls it.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from pate_torch.accounting import calibration, gdp

DELTA = 1e-5
GRID = {"rounds": (1, 4, 16), "steps": (1, 4, 16), "rate": (0.1, 0.3, 1.0), "learning_rate": (0.5, 2.0, 8.0, 32.0),
        "clip": (0.3, 1.0)}  # fmt: skip
"""Rounds of averaging; steps of a site in each; share of its records in a step; step size; clipping norm."""
Setting = dict[str, Any]
Site = tuple[Tensor, Tensor]
"""PRIVATE. Features [N, D] and classes [N] of the records of a site."""


@functools.cache
def find_multiplier(epsilon: float, steps: int, rate: float) -> float:
    if rate == 1:
        return math.sqrt(steps) / gdp.compute_mu(epsilon, DELTA)
    return calibration.calibrate_sampled_gaussian(rate, steps, epsilon=epsilon, delta=DELTA)


def train_locally(weight_CD: Tensor, z_ND: Tensor, y_N: Tensor, noise: float, setting: Setting) -> Tensor:
    """Take steps of DP-SGD by Opacus from these weights at one site, with Poisson samples."""
    linear = nn.Linear(z_ND.shape[1], len(weight_CD), bias=False)
    linear.weight.data.copy_(weight_CD)
    rate, clip, batch = setting["rate"], setting["clip"], max(1, round(setting["rate"] * len(y_N)))
    model, draw = GradSampleModule(linear), torch.Generator().manual_seed(torch.seed())
    sgd = torch.optim.SGD(model.parameters(), lr=setting["learning_rate"])
    optimizer = DPOptimizer(sgd, noise_multiplier=noise, max_grad_norm=clip, expected_batch_size=batch)
    for _ in range(setting["steps"]):
        chosen = (torch.rand(len(y_N), generator=draw) < rate).nonzero().squeeze(1)
        if not len(chosen):  # Opacus takes no empty batch, so this is the noise of its step
            linear.weight.data -= setting["learning_rate"] * noise * clip / batch * torch.randn(weight_CD.shape)
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(z_ND[chosen]), y_N[chosen]).backward()
        optimizer.step()
    return linear.weight.data.clone()


def run_fedavg(sites: list[Site], weight_CD: Tensor, epsilon: float, setting: Setting, *, flower: bool) -> Tensor:
    """Average the weights of the sites in each round, by their true numbers of records (a favor to this baseline)."""
    noise = find_multiplier(epsilon, setting["rounds"] * setting["steps"], setting["rate"])
    if flower:
        return average_by_flower(sites, weight_CD, noise, setting)
    for _ in range(setting["rounds"]):
        found = [len(y_N) * train_locally(weight_CD, z_ND, y_N, noise, setting) for z_ND, y_N in sites]
        weight_CD = torch.stack(found).sum(0) / sum(len(y_N) for _, y_N in sites)
    return weight_CD


def average_by_flower(sites: list[Site], weight_CD: Tensor, noise: float, setting: Setting) -> Tensor:
    """Run FedAvg by Flower, with a client for each site in its simulation engine."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, final = ClientApp(), ServerApp(), []

    def answer(message: Message, context: Context) -> Message:
        z_ND, y_N = sites[int(context.node_config["partition-id"])]
        start_CD = message.content["arrays"].to_torch_state_dict()["weight"]
        arrays = ArrayRecord({"weight": train_locally(start_CD, z_ND, y_N, noise, setting)})
        metrics = MetricRecord({"num-examples": len(y_N)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    def serve(grid: Grid, context: Context) -> None:
        least = {"min_train_nodes": len(sites), "min_available_nodes": len(sites)}
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, **least)
        start = {"initial_arrays": ArrayRecord({"weight": weight_CD}), "num_rounds": setting["rounds"]}
        final.append(strategy.start(grid=grid, **start).arrays.to_torch_state_dict()["weight"])

    client.train()(answer)
    server.main()(serve)
    resources = {"client_resources": {"num_cpus": os.cpu_count(), "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=len(sites), backend_config=resources)
    return final[0]
