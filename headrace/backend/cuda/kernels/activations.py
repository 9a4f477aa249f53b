"""Activations of float32 numbers, alone or gated, and the tanh of a soft cap, for kernels to
call.

The functions equal csrc/kernels_functions.h and keep its rule: a number that is not finite gives
a result that is not finite. A maximum would hide a NaN; a product with 0 reveals it. `ACTIVATION`
is a value of `headrace.program.ops.Activation`.
"""

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """X * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _exp_of_sum(high, low):
    """e^(high + low) to a relative error of 2e-7, for sums of at most 0 whose part `low` is
    small.

    Adding the parts first would turn the last bit of the sum into a relative error of the result,
    and so would the product with log2(e) in tl.exp.
    """
    high = tl.where(high < -110.0, -110.0, high)
    n = tl.floor((high + low) * 1.44269504 + 0.5)
    # ln 2 in two parts, the first with so few bits that its products are exact.
    remainder = (high - n * 0.693359375 + low) + n * 2.12194440e-4
    return tl.exp2(n) * tl.exp2(remainder * 1.44269504)


@triton.jit
def gelu(x):
    """X * normal_cdf(x), to a relative error of 1e-6 also near 0 of the result.

    With a = |x| the share is exp(-a^2 / 2) times a polynomial in 1 / (1 + 0.26 a). The square is
    taken in two parts: 16 a, rounded, has an exact square.
    """
    a = tl.minimum(tl.abs(x), 16.0)
    near = tl.floor(a * 16.0 + 0.5) * 0.0625
    e = _exp_of_sum(near * near * -0.5, (a - near) * (a + near) * -0.5)
    t = 1.0 / (a * 0.26 + 1.0)
    p = 2.94353869e-2 * t - 1.47663325e-1
    p = p * t + 2.40890056e-1
    p = p * t - 1.38903484e-1
    p = p * t + 1.52681097e-1
    p = p * t + 5.45280315e-2
    p = p * t + 1.02139287e-1
    p = p * t + 1.03141159e-1
    p = p * t + 1.03751771e-1
    return tl.maximum(x, 0.0) - tl.abs(x) * (t * p * e)


@triton.jit
def gelu_tanh(x):
    """X * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))."""
    a = tl.minimum(tl.abs(x), 16.0)
    e = _exp_of_sum(a * (a * a * -7.13548163e-2 - 1.59576912), 0.0)
    return tl.maximum(x, 0.0) - tl.abs(x) * (e / (1.0 + e))


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0) + x * 0.0


@triton.jit
def clamped_swiglu(gate, up):
    """SwiGLU with limits on gate and up (gpt-oss)."""
    g = tl.minimum(gate, 7.0)
    u = tl.maximum(tl.minimum(up, 7.0), -7.0)
    return g / (1.0 + tl.exp(g * -1.702)) * (u + 1.0) + (gate * 0.0 + up * 0.0)


@triton.jit
def soft_cap(x, cap):
    """Cap * tanh(x / cap), to 5e-7.

    tanh(y) / y is a rational function of y^2, the best of its degrees up to 9; from there tanh is
    1.
    """
    y = tl.maximum(tl.minimum(x / cap, 9.0), -9.0)
    z = y * y
    above = 1.33185747e-8 * z + 2.05831057e-5
    above = above * z + 3.49401101e-3
    above = above * z + 1.33796975e-1
    above = above * z + 1.0
    below = 7.76181082e-7 * z + 3.28305468e-4
    below = below * z + 2.58709826e-2
    below = below * z + 4.67130125e-1
    below = below * z + 1.0
    return cap * (y * above / below) + x * 0.0


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply an activation to each number."""
    tl.static_assert(ACTIVATION != "clamped_swiglu", "it takes a gate and what is gated")
    if ACTIVATION == "silu":
        y = silu(x)
    elif ACTIVATION == "gelu":
        y = gelu(x)
    elif ACTIVATION == "gelu_tanh":
        y = gelu_tanh(x)
    else:
        y = relu(x)
    return y


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Compute activation(gate) * up for each number."""
    return (
        clamped_swiglu(gate, up)
        if ACTIVATION == "clamped_swiglu"
        else activated(gate, ACTIVATION) * up
    )
