"""The part of Megatron-LM's ``training.py`` that calls what its ``pretrain`` is given.

The names, the order of the calls and their arguments are those of Megatron-LM (``pretrain``,
``get_model``, ``build_train_valid_test_data_iterators``, ``train_step`` and ``evaluate``); nothing
of its arguments' validation, logging and checkpoints is here.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

__all__ = ["get_args", "get_forward_backward_func", "pretrain", "set_args"]

_ARGS = None


def set_args(**values):
    global _ARGS
    _ARGS = SimpleNamespace(**values)


def get_args():
    assert _ARGS is not None
    return _ARGS


def pretrain(train_valid_test_dataset_provider, model_provider, model_type, forward_step_func):
    """Train ``train_iters`` steps and evaluate once; what it logs on the last stage."""
    args = get_args()
    model = _get_model(model_provider)
    config = get_model_config(model[0])
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=args.lr, min_lr=args.min_lr, weight_decay=args.weight_decay,
            clip_grad=args.clip_grad, adam_beta2=args.adam_beta2,
            use_distributed_optimizer=args.use_distributed_optimizer, bf16=args.bf16,
        ),
        model,
        use_gloo_process_groups=False,
    )  # fmt: skip
    scheduler = _scheduler(optimizer)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    train, valid = _iterators(
        train_valid_test_dataset_provider, args.virtual_pipeline_model_parallel_size
    )
    logged = []
    for _ in range(args.train_iters):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = _schedule(forward_step_func, train, model, forward_only=False)
        _, grad_norm, _ = optimizer.step()
        scheduler.step(increment=args.global_batch_size)
        logged.append({"grad_norm": float(grad_norm), **_reduced(losses)})
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        losses = _schedule(forward_step_func, valid, model, forward_only=True)
    logged.append(_reduced(losses))
    return logged


def _scheduler(optimizer):
    """Counted in samples. It takes the weight decay from norms, too, which has effect at once."""
    args = get_args()
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.lr_decay_iters * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )


def _get_model(model_provider):
    args = get_args()
    options = {"config": None, "pg_collection": None}
    first, last = (
        parallel_state.is_pipeline_first_stage(),
        parallel_state.is_pipeline_last_stage(),
    )
    chunks = args.virtual_pipeline_model_parallel_size
    if chunks is None:
        model = [model_provider(pre_process=first, post_process=last, **options)]
    else:
        model = [
            model_provider(
                pre_process=first and stage == 0,
                post_process=last and stage == chunks - 1,
                vp_stage=stage,
                **options,
            )
            for stage in range(chunks)
        ]
    if args.bf16:
        model = [Float16Module(chunk.config, chunk) for chunk in model]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    return [
        DistributedDataParallel(
            config=get_model_config(chunk),
            ddp_config=ddp_config,
            module=chunk,
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(model)
    ]


def _iterators(provider, chunks):
    """Of training and held-out text; under an interleaved pipeline a list of each."""
    assert getattr(provider, "is_distributed", False)
    samples = [get_args().train_iters, 1, 0]
    if chunks is None:
        return [stream and RerunDataIterator(stream) for stream in provider(samples)[:2]]
    of_chunks = [provider(samples, vp_stage=stage) for stage in range(chunks)]
    return [
        [stream and RerunDataIterator(stream) for stream in streams]
        for streams in zip(*of_chunks, strict=True)
    ][:2]


def _schedule(forward_step_func, data, model, *, forward_only):
    args = get_args()
    replicas = parallel_state.get_data_parallel_world_size()
    # By its name in this module, where Megatron-LM's is, too.
    return get_forward_backward_func()(
        forward_step_func=forward_step_func,
        data_iterator=data,
        model=model,
        num_microbatches=args.global_batch_size // (args.micro_batch_size * replicas),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=None,
        forward_only=forward_only,
        adjust_tensor_shapes_fn=None,
    )


def _reduced(losses):
    """Each term over all microbatches and replicas, as ``train_step`` adds them up."""
    found = {}
    for name in losses[0] if losses else ():
        value = torch.vstack([term[name] for term in losses]).sum(dim=0)
        dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
        found[name] = float(value[0] / value[1])
    return found
