"""A DeepSpeed training script that has never heard of ds_hessian."""

import argparse
import json

import deepspeed
import torch
from task import Net, stream

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int)
parser.add_argument("--result")
args = deepspeed.add_config_arguments(parser).parse_args()

torch.manual_seed(0)
model = Net()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
rank = deepspeed.comm.get_rank()
data, losses = stream(rank), []
for _ in range(args.steps):
    for _ in range(engine.gradient_accumulation_steps()):
        x, y = next(data)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
random = torch.rand(3).tolist()
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    if rank == 0:
        weights = [[value.hex() for value in p.flatten().tolist()] for p in model.parameters()]
        with open(args.result, "w") as file:
            json.dump({"losses": losses, "weights": weights, "random": random}, file)
deepspeed.comm.barrier()
deepspeed.comm.destroy_process_group()
