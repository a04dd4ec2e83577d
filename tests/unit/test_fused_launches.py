"""What is fused is one launch, on every architecture, with the choice that is made untuned, and without a workspace."""

from __future__ import annotations

import pytest

from oxidnn.device import known_device
from oxidnn.dispatch.select import choose
from oxidnn.ops.case import parse_case

X, ROWS, V = "bf16[512,4096]", "f32[512]", "bf16[4096]"
IMAGE, C = "bf16[8,64,56,56]nhwc", "f32[64]"
LINES = (
    f"layer_norm x={X} gamma={V} beta={V} residual={X} epilogue='relu(acc)' return_stats=True return_sum=True",
    f"rms_norm x={X} gamma={V} residual={X} return_stats=True return_sum=True",
    f"rms_norm x={X} gamma={V} out_dtype=e4m3 return_scale=True",
    "layer_norm x=f32[64,131072] gamma=f32[131072] beta=f32[131072]", "softmax x=bf16[64,131072]", f"softmax_backward dy={X} y={X}",
    f"softmax x={X} log=True",
    f"batch_norm x={IMAGE} gamma={C} beta={C} running_mean={C} running_var={C} residual={IMAGE} "
    "epilogue='relu(acc + residual)' training=False",
    f'pointwise x={X} y={X} z={V} expression="relu(x * y + z), x - y"', f"activation x={X} name=gelu",
    f"activation_backward dy={X} x={X} name=gelu", f"dropout x={X} p=0.1", f"dropout_backward dy={X} p=0.1",
    "random shape=(512,4096) distribution=normal dtype=bf16", f"bernoulli probability={X}",
    f"loss x={X} target={X} name=huber reduction=none", f"loss_backward x={X} target={X} name=bce_with_logits",
    f"row_loss x={X} x2={X} target=s64[512] name=cosine_embedding reduction=none",
    f"cross_entropy logits={X} target=s64[512] reduction=none label_smoothing=0.1",
    f"cross_entropy_backward logits={X} target=s64[512] d_loss=f32[512] reduction=none",
    f"max_pool x={IMAGE} window=3 stride=2 padding=1 return_indices=True", f"avg_pool x={IMAGE} window=2 stride=2",
    "resize x=bf16[8,64,28,28]nhwc size=(56,56) mode=linear", "resize_backward dy=bf16[8,64,56,56]nhwc x_shape=(8,64,28,28) mode=linear",
    f"lrn x={IMAGE}", f"lrn_backward dy={IMAGE} x={IMAGE}",
    "adam_step param_0=f32[2500] param_1=f32[3,3] grad_0=f32[2500] grad_1=f32[3,3] exp_avg_0=f32[2500] exp_avg_1=f32[3,3] "
    "exp_avg_sq_0=f32[2500] exp_avg_sq_1=f32[3,3] decays=True grad_scale=f32[] found_inf=f32[]",
    'foreach a_0=f32[5] b_0=f32[5] a_1=f32[300] b_1=f32[300] expression="a + scalar(s) * b"',
    f"dynamic_quantize x={X} kind=e4m3 scaling=token", f'dynamic_quantize x={X} kind=s4 scaling="(\'group\',128)"',
    f"dynamic_quantize x={X} kind=u8 scaling=token asymmetric=True", f'dynamic_quantize x={X} kind=e4m3 scaling="(\'block\',(128,128))"',
    f"dynamic_quantize x={X} kind=e4m3 scaling=mxfp8", f"dynamic_quantize x={X} kind=e2m1 scaling=mxfp4 layout=128x4",
    f"dynamic_quantize x={X} global_scale=f32[] kind=e2m1 scaling=nvfp4 rounding=stochastic",
    f"quantize x={X} kind=s8 scale={ROWS} zero_point=s8[512]", "dequantize x=u8[512,2048] kind=s4 scale=f32[512,32] dtype=bf16",
    f"fake_quantize x={X} kind=s4 scale={ROWS}", f"fake_quantize_backward dy={X} x={X} kind=s4 scale={ROWS}",
    "delayed_scale history=f32[16,100] amax=f32[100] scale=f32[100]",
    "transform x=f32[8,64,56,56]nchw y=bf16[8,64,56,56]nhwc dtype=bf16", f"cumsum x={X} axis=1", f"cummax x={X} axis=1",
)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("line", LINES)
def test_one_launch(line: str, arch: str) -> None:
    device, problem = known_device(arch), parse_case(line)
    engine, config, _ = choose(problem, device, None)
    build = engine.build_steps(problem, config, device)
    assert len(build.steps) == 1 and not build.workspace_bytes, f"{engine.id} {config.name}"
