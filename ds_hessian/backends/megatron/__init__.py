"""Jobs on megatron-core. The only place that knows Megatron's model, buffers and schedules."""

from ds_hessian.backends.megatron.backend import MegatronBackend
from ds_hessian.backends.megatron.objective import ForwardStep, PipelineObjective
from ds_hessian.backends.megatron.support import refuse_unsupported

__all__ = ["ForwardStep", "MegatronBackend", "PipelineObjective", "refuse_unsupported"]
