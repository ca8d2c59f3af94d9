"""What runs on the ranks: operators of the outputs on megatron-core."""

from __future__ import annotations

from typing import Any, get_args
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_hessian.config import FiniteDifferenceConfig, OperatorName
from ds_hessian.operators import curvature
from tests.megatron.job import (
    CAUSAL,
    POSITIONS,
    SEQUENCE,
    SIZE,
    SIZES,
    VOCABULARY,
    Job,
    Names,
    hessian_of,
    micro_batches,
    my_batches,
    running,
    stored,
)
from tests.nets import forward_hooks

Full = dict[str, Tensor]


def products(job: Job, count: int = 2, steps: int = 3) -> Any:
    """(for each vector (v, {operator: (product, error, norm)}, |G + R - H|), outputs, forms,
    whether the weights came back, spectra of G and, with several vectors, of R: of so many steps).
    """
    with running(job) as chunks:
        before = [p.detach().clone() for c in chunks for p in c.parameters()]
        hooks = forward_hooks(*chunks)
        hessian = hessian_of(chunks, job)
        backend, space = hessian.backend, hessian.backend.space
        v, rows = hessian.random_vector(seed=5), []
        with hessian.measuring() as opened:
            settings, session = FiniteDifferenceConfig(), opened.session
            found: Any = {
                name: curvature(session, settings, name) for name in get_args(OperatorName)
            }
            for _ in range(count):
                made = {name: operator.matvec(v) for name, operator in found.items()}
                g, r, h = (made[name].vector for name in ("ggn", "residual", "hessian"))
                figures = {
                    name: (stored(backend, p.vector), p.error, p.norm) for name, p in made.items()
                }
                form = found["ggn"].forms(v, made["ggn"].displacement).mean()
                row = stored(backend, v), figures, space.norm(g + r - h), form - space.dot(v, g)
                rows.append(row)
                v = g / space.norm(g)
        names = ("ggn", "residual")[: count if steps else 0]
        spectra = [hessian.spectrum(operator=name, num_matvecs=steps) for name in names]
        after = [p.detach() for c in chunks for p in c.parameters()]
        back = all(map(torch.equal, before, after)) and forward_hooks(*chunks) == hooks
        return rows, found["ggn"].outputs, back, [(s.alphas[0], s.betas[0]) for s in spectra]


def bending(job: Job, refuses: bool = False) -> Any:
    """(v, G v, its error) of a loss that is known by its values and bends over a fortieth of a unit
    of the outputs, which it may refuse in fp64.
    """

    def losses(model: Any, batch: dict[str, Tensor], job: Job) -> Tensor:
        from ds_hessian.backends.megatron import host

        logits = model(batch["tokens"], POSITIONS, CAUSAL)
        if not host.unwrap(model).post_process:
            return logits
        if refuses and logits.dtype == torch.float64:
            raise TypeError("on purpose")
        return functional.softplus(40 * logits.view(SIZE, SEQUENCE, -1)).mean(-1)

    with running(job) as chunks, mock.patch("tests.megatron.job.token_losses", losses):
        hessian = hessian_of(chunks, job)
        with hessian.measuring(operator="ggn") as operator:
            v = hessian.random_vector(seed=5)
            product = operator.matvec(v)
            assert "values" in operator.outputs, operator.outputs
        backend = hessian.backend
        return stored(backend, v), stored(backend, product.vector), product.error


def reference(job: Job, vectors: list[Full], fisher: bool = False) -> list[Full]:
    """G v, or the empirical Fisher matrix of tokens times v, in fp64; one process."""
    with running(job) as chunks:
        from ds_hessian.backends.megatron import host

        model = host.unwrap(chunks[0]).eval()
        parameters, names = list(model.parameters()), Names(chunks[0])
        masks = [
            b["mask"].double() if job.per_token else torch.ones(SIZE, SEQUENCE)
            for b in micro_batches()
        ]
        count = sum(float(mask.sum()) for mask in masks)
        found = []
        for v in vectors:
            directions = [names.of(v, p) for p in parameters]
            total = [torch.zeros_like(p) for p in parameters]
            for batch, mask in zip(micro_batches(), masks, strict=True):
                f = model(batch["tokens"], POSITIONS, CAUSAL).reshape(-1, VOCABULARY)
                dual = torch.zeros_like(f, requires_grad=True)
                back = torch.autograd.grad(
                    f, parameters, dual, create_graph=True, materialize_grads=True
                )
                along = sum((g * d).sum() for g, d in zip(back, directions, strict=True))
                (u,) = torch.autograd.grad(along, dual)
                p = f.detach().softmax(-1)
                if fisher:
                    p[torch.arange(len(p)), batch["labels"].reshape(-1)] -= 1
                    product = p * (p * u).sum(-1, keepdim=True)
                else:
                    product = p * (u - (p * u).sum(-1, keepdim=True))
                product = product * mask.reshape(-1, 1) / count
                found_here = torch.autograd.grad(f, parameters, product, materialize_grads=True)
                for t, g in zip(total, found_here, strict=True):
                    t += g
            found.append(names.full(parameters, total))
        return found


def multimodal(function: Any, job: Job, *args: Any) -> Any:
    """What a function of this module returns for the model as the language model of another."""
    from tests.megatron.job import gpt

    def inside(job: Job, config: Any, stage: int = 0) -> Any:
        from megatron.core.transformer.module import MegatronModule

        class Multimodal(MegatronModule):  # type: ignore[misc]  # Megatron has no types
            """With attributes that Megatron's LLaVA has."""

            def __init__(self, language_model: Any) -> None:
                super().__init__(config)
                self.language_model, self.model_type = language_model, language_model.model_type
                self.pre_process = language_model.pre_process
                self.post_process = language_model.post_process
                self.share_embeddings_and_output_weights = job.tied
                self.set_input_tensor = language_model.set_input_tensor

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                """That of the language model."""
                return self.language_model(*args, **kwargs)

            def shared_embedding_or_output_weight(self) -> Any:
                """That of the language model."""
                return self.language_model.shared_embedding_or_output_weight()

        return Multimodal(gpt(job, config, stage))

    with mock.patch("tests.megatron.job.gpt", inside):
        return function(job, *args)


def scaled_logits(operator: str) -> tuple[str, bool]:
    """What is said of a model whose logits a parameter of another module scales, that has it as its
    `module`; and whether all parameters have coordinates.
    """
    import ds_hessian
    from tests.megatron.job import gpt

    def inside(job: Job, config: Any, stage: int = 0) -> Any:
        from megatron.core.transformer.module import MegatronModule

        class Scaled(MegatronModule):  # type: ignore[misc]  # Megatron has no types
            """Takes the logits of a model times a number, which it learns."""

            def __init__(self, module: Any) -> None:
                super().__init__(config)
                self.module, self.model_type = module, module.model_type
                self.scale, self.set_input_tensor = nn.Parameter(torch.ones(())), lambda _: None

            def forward(self, *args: Any, labels: Tensor) -> Tensor:
                """The losses of tokens."""
                logits = self.scale * self.module(*args)
                losses = functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), reduction="none"
                )
                return losses.view(labels.shape)

        return Scaled(gpt(job, config, stage))

    with mock.patch("tests.megatron.job.gpt", inside), running(Job()) as chunks:
        trained = sum(p.numel() for p in chunks[0].parameters())
        try:
            hessian = hessian_of(chunks, Job())
            n = hessian.spectrum(operator=operator, num_matvecs=1).n
        except ds_hessian.HessianError as error:
            return str(error), hessian.backend.space.n == trained
        return "measured", n == trained


def nested_head(operator: str, aside: bool, job: Job, **config: Any) -> str:
    """The outputs on record of a model that has another as its auxiliary one, beside a head of its
    own or (not `aside`) alone; or what is said of them.
    """
    from tests.megatron.job import gpt

    def inside(job: Job, config: Any, stage: int = 0) -> Any:
        from megatron.core.transformer.module import MegatronModule

        class Two(MegatronModule):  # type: ignore[misc]  # Megatron has no types
            """Returns the losses of tokens of its head, and those of the auxiliary model."""

            def __init__(self, auxiliary: Any) -> None:
                super().__init__(config)
                self.auxiliary, self.model_type = auxiliary, auxiliary.model_type
                self.pre_process, self.post_process = auxiliary.pre_process, auxiliary.post_process
                self.share_embeddings_and_output_weights = job.tied
                self.set_input_tensor = auxiliary.set_input_tensor
                if aside and self.post_process:
                    self.head = nn.Linear(SEQUENCE, VOCABULARY)
                    auxiliary.decoder.register_forward_hook(self._keep)

            def _keep(self, module: Any, args: Any, output: Tensor) -> None:
                self.hidden = output

            def forward(self, *args: Any, labels: Tensor) -> Tensor:
                """The losses of tokens, or the activations of a stage."""
                losses = self.auxiliary(*args, labels=labels)
                if not (aside and self.post_process):
                    return losses
                logits = self.head(self.hidden[..., :SEQUENCE]).transpose(0, 1)
                own = functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), reduction="none"
                )
                return 0.3 * losses + own.view(labels.shape)

        return Two(gpt(job, config, stage))

    return _outputs(inside, operator, job, config)


def _outputs(
    model: Any, operator: str, job: Job, config: dict[str, Any], forward_step: Any = None
) -> str:
    """The outputs on record of a job with such a model, or what is said of them."""
    import ds_hessian

    with mock.patch("tests.megatron.job.gpt", model), running(job) as chunks:
        try:
            hessian = hessian_of(chunks, job, **config)
            if forward_step is not None:
                hessian.use(my_batches(), forward_step, **SIZES)
            found = hessian.spectrum(operator=operator, num_matvecs=1)
        except ds_hessian.HessianError as error:
            return str(error)
        return str(found.provenance.outputs)


def bert(operator: str, loss_of_pairs: bool, job: Job, **config: Any) -> str:
    """The outputs on record of BERT, with or without the loss of its second head; or what is said
    of them.
    """

    def model(job: Job, config: Any, stage: int = 0) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
        from megatron.core.models.bert.bert_model import BertModel

        return BertModel(
            config,
            2,
            bert_layer_local_spec,
            VOCABULARY,
            SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=job.tied,
        )

    def forward_step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        tokens, mask = batch["tokens"], torch.ones(SIZE, SEQUENCE, dtype=torch.int64)

        def loss(made: Any) -> Any:
            losses, pairs = made
            found = losses.mean()
            if loss_of_pairs:
                found = found + functional.cross_entropy(pairs, tokens[:, 0] % 2)
            return found, {}

        return model(tokens, mask, tokens % 2, lm_labels=batch["labels"]), loss

    return _outputs(model, operator, job, config, forward_step)


def several_predictions() -> str:
    """The message for a model whose output layer is called twice for a micro-batch."""
    import ds_hessian

    with running(Job()) as chunks:
        from ds_hessian.backends.megatron import host

        model = host.unwrap(chunks[0])
        model.output_layer.register_forward_pre_hook(_again(model))
        try:
            hessian_of(chunks, Job()).spectrum(operator="ggn", num_matvecs=2)
        except ds_hessian.HessianError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


def _again(model: Any) -> Any:
    inside: list[bool] = []

    def call(layer: Any, args: Any, *rest: Any) -> None:
        if not inside:
            inside.append(True)
            layer(*args, weight=model.shared_embedding_or_output_weight())
            inside.clear()

    return call
