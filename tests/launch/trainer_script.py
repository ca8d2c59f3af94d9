"""A training script on the Trainer of transformers that has never heard of ds_hessian.

Its learning rate is 0 and its rows are all the same, so that the loss is known.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"vocab_size": 13, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}

if __name__ == "__main__":
    arguments = TrainingArguments(
        output_dir="out",
        deepspeed="ds_config.json",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.0,
        max_steps=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
    )
    Trainer(model=model, args=arguments, train_dataset=[row] * 32).train()
