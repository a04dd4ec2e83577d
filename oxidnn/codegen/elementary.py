"""Elementary functions as PTX: what an Emitter writes for exp, log, tanh, erf, ... in f32 and f64.

f32 versions use ex2.approx, rcp.approx and rsqrt.approx (about 1 to 2 ulp) where the argument is in range, and polynomials where those
lose relative accuracy; all keep subnormals, infinities and NaN. The polynomials interpolate at Chebyshev nodes (coefficients highest
first); what each approximates, and where, stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .environment import f32_literal, f64_literal

# (log1p(f) - f) / f^2, |f| <= 1/3 · (expm1(r) - r) / r^2, |r| <= ln2/2 · (tanh(x)/x - 1) / z, z = x^2, x < 0.5626
# erf(x)/x - 1 in z, x < 1 · log2(erfc(t)) / t, 0.9 < t < 4 · erfc(a) exp(a^2) (a + K) in u = (a - K)/(a + K), a < 10.5 (K = 3; f64: 28, 4)
# sin(2 pi c)/c in z = c^2, |c| <= 1/4 · Phi(-a) exp(a^2/2) (a + K) in u = (a - K)/(a + K), a < 13.4 (brief: K = 3.25, relative error 2^-18)
# (atan(t)/t - 1)/z, z = t^2, t <= tan(pi/8) · (asin(x)/x - 1)/z, z = x^2, x <= 1/2
# (sin(r)/r - 1)/z and (cos(r) - 1 + z/2)/z^2, z = r^2, |r| <= pi/4 · (2 atanh(s) - 2s) / (s z), z = s^2, s <= 0.1716
# lgamma(2 + z)/z, |z| <= 1/2 · erfinv(x)/x in w = -log(1 - x^2), mapped to [-1, 1], to 5 (f64: 6.25); in sqrt(w) to 4.2 (f64: 4; 6.1)
LOG1P_F32 = (
    0.11629986, -0.127455264, 0.108498253, -0.122176208, 0.142963842, -0.166781962, 0.199998498, -0.249998376, 0.333333343, -0.5,
)
EXPM1_F32 = (
    0.000198911614, 0.00139338034, 0.00833331048, 0.041666463, 0.166666672, 0.5,
)
TANH_F32 = (
    0.00248730392, -0.0084990263, 0.0218118485, -0.0539640598, 0.133333221, -0.333333343,
)
ERF_F32 = (
    7.87587487e-05, -0.00080168643, 0.00518908724, -0.0268542115, 0.112835944, -0.37612626, 0.128379166,
)
ERFC_LOG2_F32 = (
    4.24200948e-07, -6.98319127e-06, 2.27721412e-05, 0.000377438613, -0.00523015298, 0.0345385224, -0.153762311, -0.915957451,
    -1.6283989,
)
ERFCX_F32 = (
    -0.000333150354, -0.00049714226, 0.00307963206, -0.00121720927, -0.0268374253, 0.119527079, -0.310466528, 0.590228438,
    -0.88339448, 1.07400692,
)
LOG1P_BRIEF = (0.170169339, -0.19387579, 0.198133543, -0.248448223, 0.333369464, -0.500021279)  # relative error of log1p 2^-19.8
ERFCX_BRIEF = (0.00769733498, 0.000396006915, -0.0807988718, 0.274564028, -0.539496422, 0.737435997)
SIN_F32 = (
    2.72493548e-06, -0.000198400827, 0.00833333191, -0.166666672,
)
SIN_TURN_F32 = (39.7109184, -76.5749893, 81.6022339, -41.3416786, 6.28318548)
COS_F32 = (
    2.45474712e-05, -0.00138883013, 0.0416666642,
)
EXPM1_F64 = (
    1.60867223023761e-10, 2.091827928734074e-09, 2.5052070838836402e-08, 2.7557262895818646e-07, 2.7557319247457836e-06,
    2.4801587336800972e-05, 0.0001984126984126321, 0.0013888888888878939, 0.008333333333333333, 0.04166666666666668,
    0.16666666666666666, 0.5,
)
LOG_F64 = (
    0.13087236196706833, 0.13268714792342884, 0.15386241881938825, 0.18181795600060788, 0.22222222392089008, 0.28571428570801954,
    0.4000000000000088, 0.6666666666666666,
)
SIN_F64 = (
    -7.586584848459798e-13, 1.605852971266686e-10, -2.5052106220409384e-08, 2.7557319219304477e-06, -0.0001984126984126502,
    0.008333333333333331, -0.16666666666666666,
)
COS_F64 = (
    4.7458094823324423e-14, -1.1470459827734575e-11, 2.0876755784387464e-09, -2.755731922138354e-07, 2.480158730158462e-05,
    -0.0013888888888888887, 0.041666666666666664,
)
ERF_F64 = (
    -4.2309458242953175e-12, 8.709045129053093e-11, -1.2164560057283446e-09, 1.4792401209404812e-08, -1.6364642158167616e-07,
    1.6462045441468418e-06, -1.4925647567519332e-05, 0.00012055332902888736, -0.000854832702193483, 0.0052239776254232985,
    -0.02686617064512984, 0.1128379167095512, -0.37612638903183754, 0.1283791670955126,
)
ERFCX_F64 = (
    9.084541771213907e-10, -6.36903746253068e-10, -1.5213206819950384e-08, 3.3863100022513686e-09, 1.2397022621920958e-07,
    -7.900030007324783e-08, -8.46291501725211e-07, 1.4268525380407012e-06, 4.694619976583313e-06, -1.886213507131139e-05,
    -3.635296646587849e-06, 0.00017681319046764806, -0.0004550526455639654, -0.00028095893558087193, 0.0061120556492774555,
    -0.02637005333230321, 0.07638151490987771, -0.17401093724044453, 0.33085158787798813, -0.5408538313132201, 0.7732087022652374,
    -0.9765487290808821, 1.095995661000491,
)
ATAN_F32 = (-0.0645184144, 0.107437052, -0.142639533, 0.199995399, -0.333333313)
ATAN_F64 = (
    -0.01917627151752541, 0.03923115561987146, -0.050854323376990446, 0.05858145587628195, -0.06664511064599371, 0.07692183163650894,
    -0.09090904576954117, 0.11111111015227572, -0.14285714284666184, 0.19999999999995519, -0.3333333333333333,
)
ASIN_F32 = (0.0336918347, 0.0171486866, 0.0311007686, 0.0445993915, 0.0750009492, 0.166666657)
ASIN_F64 = (
    0.02961431186348912, -0.019245257116497865, 0.019556980312071145, 0.003043893553525322, 0.009319814583697673,
    0.009621799004518932, 0.011566464825440121, 0.013963779590463264, 0.01735281656310595, 0.02237215744272046, 0.030381944475548442,
    0.04464285714255172, 0.07500000000000118, 0.16666666666666666,
)
LGAMMA_F64 = (
    -1.3219945666117874e-07, 2.78740805211359e-07, -4.3252393445604814e-07, 9.200527894968101e-07, -2.0439048107029907e-06,
    4.38470440459836e-06, -9.438715099211532e-06, 2.0505590755833454e-05, -4.49263133791557e-05, 9.945767355819498e-05,
    -0.00022315475400520507, 0.0005096695154115458, -0.0011927539118428156, 0.002890510331034267, -0.0073855510286719986,
    0.02058080842778038, -0.0673523010531981, 0.32246703342411326, 0.42278433509846713,
)
ERFINV_F32 = (
    -3.40725936e-05, 3.56078601e-05, 0.0002857247, -0.000845699528, -0.00048558786, 0.0085292729, -0.0195738499, -0.0261087055,
    0.616600698, 1.50140936,
)
ERFINV_TAIL_F32 = (
    8.00689162e-05, -8.53728299e-05, -0.000319520741, 0.000996593869, -0.00171453219, 0.00255729905, -0.00387054651, 0.0055440465,
    0.986781339, 3.05175705,
)
ERFINV_F64 = (
    7.801712199036253e-10, -8.577966939639941e-11, -8.627191009014394e-09, 9.07207594789291e-09, 3.931511157646558e-08,
    -1.0514990713371436e-07, -1.0412692841159635e-08, 5.456420572209782e-07, -1.0591188098187532e-06, -6.87655180725494e-07,
    7.12993974314695e-06, -1.1255653983969421e-05, -1.5027665773117194e-05, 9.336692787624058e-05, -0.0001168888508125076,
    -0.00026439358646646055, 0.0012324855702994214, -0.0012716922769885114, -0.004137314377547895, 0.0178083618187569,
    -0.022604447453444733, -0.0589225671037876, 0.7504943200799635, 1.6536545626831027,
)
ERFINV_TAIL_F64 = (
    -6.385846404875191e-11, 3.929056598182976e-12, 9.85047133124713e-10, -2.7195823537882847e-09, -3.6086983146965074e-10,
    2.6703991718481456e-08, -9.46984593753811e-08, 9.267642775523117e-08, 5.264680305425013e-07, -2.6646983082852556e-06,
    5.127314470348767e-06, 2.4058391918338327e-06, -4.739182677882865e-05, 0.00016966502592018017, -0.0004006356984211825,
    0.0007883078509981353, -0.0015825410894034398, 0.00302113943638407, 0.7539442257706239, 3.0838856104922208,
)
ERFINV_FAR_F64 = (
    6.307826181745226e-11, 2.0194198350167507e-12, -7.90683999697298e-10, 2.3885240700769668e-09, -4.984996381194203e-09,
    1.011053871325393e-08, -1.914660588328385e-08, 3.573143865797465e-08, -8.522914099015427e-08, 2.978189043184647e-07,
    -1.2763576425122616e-06, 5.620177605032979e-06, -2.3451082248504614e-05, 8.659304743598532e-05, -0.00023188618669361995,
    -0.00018726854582615907, 1.0607992684776597, 4.90042105144364,
)
# Bernoulli numbers: B_2k / (2k (2k - 1)), the series of log Gamma; B_2k / (2k) and B_2k, those of its derivatives
STIRLING = (-3617 / 122400, 1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)
DIGAMMA = (-3617 / 8160, 1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)
TRIGAMMA = (-3617 / 510, 7 / 6, -691 / 2730, 5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6)

BRIEF_ULP = 128  # 2^-16: an eighth of what rounding to f16 may cost
LOG2E = 1.4426950408889634
LOG2E_LOW = 1.925963033500011e-08  # what f32 loses of it
LN2 = 0.6931471805599453
INF = float("inf")
NAN = float("nan")
_REGISTER_STEMS = {"pred": "p", "b16": "h", "b32": "r", "b64": "l", "f32": "f", "f64": "d"}
_REGISTER_TYPES = {"f16": "b16", "bf16": "b16", "s32": "b32", "u32": "b32", "s64": "b64", "u64": "b64",
                   "s8": "b32", "u8": "b32", "s16": "b32", "u16": "b32"}


class Emitter:
    """Collects instructions in single assignment; `e("fma.rn.f32", a, b, c)` appends one and returns its new destination register.

    Operands are registers, or numbers written as literals of the instruction's last type. Names begin with `prefix`. brief: results are
    rounded to 16 bits, so f32 functions may err by BRIEF_ULP units where that takes fewer instructions.
    """

    def __init__(self, prefix: str = "%pw_", brief: bool = False) -> None:
        self.prefix = prefix
        self.brief = brief
        self.lines: list[str] = []
        self.counts: dict[str, int] = {}

    def register(self, kind: str) -> str:
        kind = _REGISTER_TYPES.get(kind, kind)
        index = self.counts.get(kind, 0)
        self.counts[kind] = index + 1
        return f"{self.prefix}{_REGISTER_STEMS[kind]}{index}"

    def __call__(self, instruction: str, *operands: str | float, to: str = "") -> str:
        words = instruction.split(".")
        kind = to or ("pred" if words[0] == "setp" else words[-2] if words[0] == "cvt" else words[-1])
        target = self.register(kind)
        self.lines.append(f"{instruction} {target}, {', '.join(literal(o, words[-1]) for o in operands)};")
        return target

    def declarations(self) -> list[str]:
        return [f".reg .{kind} {self.prefix}{_REGISTER_STEMS[kind]}<{count}>;" for kind, count in sorted(self.counts.items())]

    def polynomial(self, x: str, coefficients: Sequence[float], t: str) -> str:
        """Horner's scheme, highest coefficient first."""
        value: str | float = coefficients[0]
        for c in coefficients[1:]:
            value = self(f"fma.rn.{t}", value, x, c)
        return str(value)


def literal(value: str | float, t: str) -> str:
    if isinstance(value, str):
        return value
    if t == "f32":
        return f32_literal(value)
    return f64_literal(value) if t == "f64" else str(int(value))


def select(e: Emitter, condition: str, a: str | float, b: str | float, t: str) -> str:
    """a where the predicate holds, else b."""
    return e(f"selp.{t if t[0] == 'f' else 'b' + t[1:]}", a, b, condition)


def exp_f32(e: Emitter, x: str) -> str:
    """2^n * 2^r, n = rint(x log2e) kept in [-126, 126] so that 2^n is a normal number; what is left over stays in r.

    Adding 1.5 2^23 rounds to an integer and leaves it in the low bits, by instructions of full rate, which conversions are not. A result
    that .ftz flushes (r < -126) would vanish in the product with 2^-126 as well. Brief: the product x log2e is rounded, an error of
    |x| 2^-24, at most 2^-17.
    """
    if e.brief:
        return e("ex2.approx.f32", e("mul.rn.f32", x, LOG2E))
    n = e("min.f32", e("max.f32", e("mul.rn.f32", x, LOG2E), -126.0), 126.0)
    shifted = e("add.rn.f32", n, 1.5 * 2**23)
    r = e("fma.rn.f32", x, LOG2E, e("neg.f32", e("sub.rn.f32", shifted, 1.5 * 2**23)))
    r = e("fma.rn.f32", x, LOG2E_LOW, r)
    power = e("mov.b32", e("add.s32", e("shl.b32", e("mov.b32", shifted), 23), 127 << 23), to="f32")
    return e("mul.rn.f32", e("ex2.approx.ftz.f32", r), power)


def _power_of_two_f32(e: Emitter, n: str) -> str:
    return e("mov.b32", e("mad.lo.s32", e("cvt.rni.s32.f32", n), 1 << 23, 127 << 23), to="f32")


def _power_of_two_f64(e: Emitter, n: str) -> str:
    """2^n of an s32 register in [-1022, 1023]."""
    return e("mov.b64", f"{{{e('mov.b32', 0)}, {e('mad.lo.s32', n, 1 << 20, 1023 << 20)}}}", to="f64")


def _reduce_exp_f64(e: Emitter, x: str, low: float, high: float) -> tuple[str, str]:
    """n = rint(x log2e) in [low, high] (s32) and expm1 of the rest r = x - n ln2."""
    n = e("mul.rn.f64", x, LOG2E)
    n = e("cvt.rni.f64.f64", e("min.f64", e("max.f64", n, low), high))
    minus = e("neg.f64", n)
    r = e("fma.rn.f64", minus, 1.90821492927058770002e-10, e("fma.rn.f64", minus, 6.93147180369123816490e-01, x))
    p = e("fma.rn.f64", e.polynomial(r, EXPM1_F64, "f64"), e("mul.rn.f64", r, r), r)
    return e("cvt.rni.s32.f64", n), p


def exp_f64(e: Emitter, x: str) -> str:
    x = _clamp(e, x, -800.0, 800.0, "f64")
    return _scale_f64(e, *_reduce_exp_f64(e, x, -1200.0, 1200.0))


def exp2_f64(e: Emitter, x: str) -> str:
    x = _clamp(e, x, -1200.0, 1200.0, "f64")
    n = e("cvt.rni.f64.f64", x)
    r = e("mul.rn.f64", e("sub.rn.f64", x, n), LN2)
    p = e("fma.rn.f64", e.polynomial(r, EXPM1_F64, "f64"), e("mul.rn.f64", r, r), r)
    return _scale_f64(e, e("cvt.rni.s32.f64", n), p)


def _scale_f64(e: Emitter, n: str, p: str) -> str:
    """(1 + p) 2^n, in two steps so that subnormal results are rounded once."""
    half = e("shr.s32", n, 1)
    value = e("mul.rn.f64", e("add.rn.f64", p, 1.0), _power_of_two_f64(e, half))
    return e("mul.rn.f64", value, _power_of_two_f64(e, e("sub.s32", n, half)))


def _clamp(e: Emitter, x: str, low: float, high: float, t: str) -> str:
    """min(max(x, low), high); NaN stays NaN."""
    return minimum(e, maximum(e, x, low, t), high, t)


def maximum(e: Emitter, a: str | float, b: str | float, t: str) -> str:
    return _extremum(e, a, b, t, "max")


def minimum(e: Emitter, a: str | float, b: str | float, t: str) -> str:
    return _extremum(e, a, b, t, "min")


def _extremum(e: Emitter, a: str | float, b: str | float, t: str, name: str) -> str:
    if t == "f32":
        return e(f"{name}.NaN.f32", a, b)
    if t == "f64":
        return e("selp.f64", NAN, e(f"{name}.f64", a, b), e("setp.nan.f64", a, b))
    return e(f"{name}.{t}", a, b)


def expm1_f32(e: Emitter, x: str) -> str:
    """2 (2^(n-1) expm1(r) + (2^(n-1) - 1/2)); the halves keep 2^n in range at the upper end. Tiny x is its own result."""
    held = _clamp(e, x, -40.0, 90.0, "f32")
    n = e("cvt.rni.f32.f32", e("mul.rn.f32", held, LOG2E))
    n = e("min.f32", n, 128.0)
    minus = e("neg.f32", n)
    r = e("fma.rn.f32", minus, 1.42860677e-06, e("fma.rn.f32", minus, 0.693145752, held))
    p = e("fma.rn.f32", e.polynomial(r, EXPM1_F32, "f32"), e("mul.rn.f32", r, r), r)
    scale = _power_of_two_f32(e, e("sub.rn.f32", n, 1.0))
    half = e("fma.rn.f32", p, scale, e("sub.rn.f32", scale, 0.5))
    return _keep_tiny(e, x, e("add.rn.f32", half, half), 2.0**-25, "f32")


def expm1_f64(e: Emitter, x: str) -> str:
    n, p = _reduce_exp_f64(e, _clamp(e, x, -60.0, 720.0, "f64"), -100.0, 1024.0)
    scale = _power_of_two_f64(e, e("sub.s32", n, 1))
    half = e("fma.rn.f64", p, scale, e("sub.rn.f64", scale, 0.5))
    return _keep_tiny(e, x, e("add.rn.f64", half, half), 2.0**-54, "f64")


def _keep_tiny(e: Emitter, x: str, value: str, limit: float, t: str) -> str:
    return e(f"selp.{t}", x, value, e(f"setp.lt.{t}", e(f"abs.{t}", x), limit))


def _log_parts_f32(e: Emitter, x: str) -> tuple[str, str]:
    """(log(m), k) with x = m * 2^k, 2/3 <= m < 4/3; x positive and finite."""
    tiny = e("setp.lt.f32", x, 2.0**-126)
    bits = e("mov.b32", e("selp.f32", e("mul.rn.f32", x, 2.0**23), x, tiny), to="b32")
    k = e("and.b32", e("sub.s32", bits, 0x3F2AAAAB), 0xFF800000)
    f = e("add.rn.f32", e("mov.b32", e("sub.s32", bits, k), to="f32"), -1.0)
    exponent = e("fma.rn.f32", e("cvt.rn.f32.s32", k), 2.0**-23, e("selp.f32", -23.0, 0.0, tiny))
    return _log1p_reduced_f32(e, f), exponent


def _log1p_reduced_f32(e: Emitter, f: str) -> str:
    return e("fma.rn.f32", e.polynomial(f, LOG1P_BRIEF if e.brief else LOG1P_F32, "f32"), e("mul.rn.f32", f, f), f)


def _finite_above(e: Emitter, x: str, low: float, value: str, special: str, t: str) -> str:
    """`value` where low < x < inf, else `special`."""
    inside = e("and.pred", e(f"setp.gt.{t}", x, low), e(f"setp.lt.{t}", x, INF))
    return e(f"selp.{t}", value, special, inside)


def log_f32(e: Emitter, x: str) -> str:
    log_m, k = _log_parts_f32(e, x)
    return _finite_above(e, x, 0.0, e("fma.rn.f32", k, LN2, log_m), e("lg2.approx.f32", x), "f32")


def log2_f32(e: Emitter, x: str) -> str:
    log_m, k = _log_parts_f32(e, x)
    return _finite_above(e, x, 0.0, e("fma.rn.f32", log_m, LOG2E, k), e("lg2.approx.f32", x), "f32")


def log1p_f32(e: Emitter, x: str) -> str:
    """log(1 + x) = k ln2 + log1p(f), f = x 2^-k + (2^-k - 1), with k chosen from 1 + x."""
    total = e("add.rn.f32", x, 1.0)
    k = e("and.b32", e("sub.s32", e("mov.b32", total, to="b32"), 0x3F2AAAAB), 0xFF800000)
    scaled = e("mov.b32", e("sub.s32", e("mov.b32", x, to="b32"), k), to="f32")
    four = e("mov.b32", e("sub.s32", 0x40800000, k), to="f32")  # 4 * 2^-k, a normal number for every k
    f = e("add.rn.f32", e("selp.f32", x, scaled, e("setp.eq.s32", k, 0)), e("fma.rn.f32", four, 0.25, -1.0))
    value = e("fma.rn.f32", e("mul.rn.f32", e("cvt.rn.f32.s32", k), 2.0**-23), LN2, _log1p_reduced_f32(e, f))
    value = _keep_tiny(e, x, value, 2.0**-25, "f32")
    return _finite_above(e, x, -1.0, value, e("lg2.approx.f32", total), "f32")


def _log_parts_f64(e: Emitter, x: str, numerator: str | None = None) -> tuple[str, str]:
    """(f, k): x = (1 + f) * 2^k, sqrt(1/2) <= 1 + f < sqrt(2); x positive and finite."""
    tiny = e("setp.lt.f64", x, 2.0**-1022)
    scaled = e("selp.f64", e("mul.rn.f64", x, 2.0**54), x, tiny)
    low, high = e.register("b32"), e.register("b32")
    e.lines.append(f"mov.b64 {{{low}, {high}}}, {scaled};")
    k = e("and.b32", e("sub.s32", high, 0x3FE6A09E), 0xFFF00000)
    f = e("add.rn.f64", e("mov.b64", f"{{{low}, {e('sub.s32', high, k)}}}", to="f64"), -1.0)
    exponent = e("sub.s32", e("shr.s32", k, 20), e("selp.b32", 54, 0, tiny))
    return f, e("cvt.rn.f64.s32", exponent)


def _log_sum_f64(e: Emitter, f: str, k: str, correction: str | None = None) -> str:
    """k ln2 + log(1 + f), from s = f / (2 + f): log(1 + f) = f - (f^2/2 - s (f^2/2 + R(s^2)))."""
    s = e("div.rn.f64", f, e("add.rn.f64", f, 2.0))
    z = e("mul.rn.f64", s, s)
    rest = e("mul.rn.f64", z, e.polynomial(z, LOG_F64, "f64"))
    half = e("mul.rn.f64", e("mul.rn.f64", f, f), 0.5)
    low = e("mul.rn.f64", k, 1.90821492927058770002e-10)
    if correction is not None:
        low = e("add.rn.f64", low, correction)
    inner = e("fma.rn.f64", s, e("add.rn.f64", half, rest), low)
    return e("fma.rn.f64", k, 6.93147180369123816490e-01, e("sub.rn.f64", f, e("sub.rn.f64", half, inner)))


def _log_special_f64(e: Emitter, x: str, zero: float) -> str:
    """What log is where x - zero is not positive and finite: -inf at `zero`, NaN below, x itself at infinity and NaN."""
    below = e("selp.f64", NAN, x, e("setp.lt.f64", x, zero))
    return e("selp.f64", -INF, below, e("setp.eq.f64", x, zero))


def log_f64(e: Emitter, x: str) -> str:
    return _finite_above(e, x, 0.0, _log_sum_f64(e, *_log_parts_f64(e, x)), _log_special_f64(e, x, 0.0), "f64")


def log2_f64(e: Emitter, x: str) -> str:
    f, k = _log_parts_f64(e, x)
    value = e("fma.rn.f64", _log_sum_f64(e, f, e("mul.rn.f64", k, 0.0)), LOG2E, k)
    return _finite_above(e, x, 0.0, value, _log_special_f64(e, x, 0.0), "f64")


def log1p_f64(e: Emitter, x: str) -> str:
    """log of the rounded sum u = 1 + x, plus the relative part that rounding lost: (x - (u - 1)) / u."""
    u = e("add.rn.f64", x, 1.0)
    big = e("setp.gt.f64", x, 1.0)
    lost = e("selp.f64", e("sub.rn.f64", 1.0, e("sub.rn.f64", u, x)), e("sub.rn.f64", x, e("sub.rn.f64", u, 1.0)), big)
    f, k = _log_parts_f64(e, u)
    value = _log_sum_f64(e, f, k, e("div.rn.f64", lost, u))
    value = _keep_tiny(e, x, value, 2.0**-54, "f64")
    return _finite_above(e, x, -1.0, value, _log_special_f64(e, x, -1.0), "f64")


def tanh_f32(e: Emitter, x: str) -> str:
    """x + x z P(z) below 0.55, else 1 - 2 / (e^2|x| + 1) with the sign of x."""
    z = e("mul.rn.f32", x, x)
    small = e("fma.rn.f32", e("mul.rn.f32", e.polynomial(z, TANH_F32, "f32"), z), x, x)
    a = e("abs.f32", x)
    grown = e("ex2.approx.ftz.f32", e("mul.rn.f32", a, 2 * LOG2E))
    large = e("fma.rn.f32", e("rcp.approx.ftz.f32", e("add.rn.f32", grown, 1.0)), -2.0, 1.0)
    return e("copysign.f32", x, e("selp.f32", small, large, e("setp.lt.f32", a, 0.55)))


def tanh_f64(e: Emitter, x: str) -> str:
    """t / (t + 2), t = expm1(2|x|), with the sign of x."""
    t = expm1_f64(e, e("mul.rn.f64", minimum(e, e("abs.f64", x), 22.0, "f64"), 2.0))
    return e("copysign.f64", x, e("div.rn.f64", t, e("add.rn.f64", t, 2.0)))


def sigmoid_f32(e: Emitter, x: str) -> str:
    """min(1, e^x) / (1 + e^-|x|): full relative accuracy on both sides."""
    t = exp_f32(e, e("neg.f32", e("abs.f32", x)))
    top = e("selp.f32", t, 1.0, e("setp.lt.f32", x, 0.0))
    return e("mul.rn.f32", top, e("rcp.approx.ftz.f32", e("add.rn.f32", t, 1.0)))


def sigmoid_f64(e: Emitter, x: str) -> str:
    t = exp_f64(e, e("neg.f64", e("abs.f64", x)))
    return e("div.rn.f64", e("selp.f64", t, 1.0, e("setp.lt.f64", x, 0.0)), e("add.rn.f64", t, 1.0))


def _erfc_tail(e: Emitter, a: str, half_square: bool, t: str, factor: float = 1.0) -> str:
    """factor (a power of two) times erfc(a) for a >= 0 (half_square: a holds sqrt(2) times that, as the normal distribution wants it).

    exp(-s) (1 - low) P(u) / (a + K): the square s + low is exact, since an error d in it would be a relative error d of the result.
    """
    coefficients, pole = (ERFCX_F32, 3.0) if t == "f32" else (ERFCX_F64, 4.0)
    limit = (11.0 if t == "f32" else 28.0) * (1.5 if half_square else 1.0)
    a = minimum(e, a, limit, t)
    scaled = e(f"mul.rn.{t}", a, -0.5 if half_square else -1.0)
    square = e(f"mul.rn.{t}", a, scaled)  # -s
    low = e(f"fma.rn.{t}", a, scaled, e(f"neg.{t}", square))
    decay = (exp_f32 if t == "f32" else exp_f64)(e, square)
    decay = e(f"fma.rn.{t}", low, decay, decay)
    below = e(f"fma.rn.{t}", a, 0.7071067811865476, pole) if half_square else e(f"add.rn.{t}", a, pole)
    r = e("rcp.approx.ftz.f32" if t == "f32" else "rcp.rn.f64", below)
    u = e(f"fma.rn.{t}", r, -2 * pole, 1.0)
    return e(f"mul.rn.{t}", e(f"mul.rn.{t}", e.polynomial(u, [factor * k for k in coefficients], t), r), decay)


def erfc(t: str) -> Callable[[Emitter, str], str]:
    def lower(e: Emitter, x: str) -> str:
        tail = _erfc_tail(e, e(f"abs.{t}", x), False, t)
        return e(f"selp.{t}", e(f"sub.rn.{t}", 2.0, tail), tail, e(f"setp.lt.{t}", x, 0.0))

    return lower


def normcdf(t: str) -> Callable[[Emitter, str], str]:
    """Distribution function of the normal distribution, erfc(-x / sqrt(2)) / 2, with full relative accuracy for negative x.

    Brief: the square is rounded as in exp_f32. Its exponential is spelled as that of -0.5 * (x * x), which the derivative has as well.
    """

    def lower(e: Emitter, x: str) -> str:
        if e.brief and t == "f32":
            decay = exp_f32(e, e("mul.rn.f32", -0.5, e("mul.rn.f32", x, x)))
            r = e("rcp.approx.ftz.f32", e("add.rn.f32", e("abs.f32", x), 3.25))
            u = e("fma.rn.f32", r, -6.5, 1.0)
            tail = e("mul.rn.f32", e("mul.rn.f32", e.polynomial(u, ERFCX_BRIEF, "f32"), r), decay)
            return e("selp.f32", e("sub.rn.f32", 1.0, tail), tail, e("setp.gt.f32", x, 0.0))
        tail = _normal_tail_f32(e, x) if t == "f32" else _erfc_tail(e, e("abs.f64", x), True, t, 0.5)
        return e(f"selp.{t}", e(f"sub.rn.{t}", 1.0, tail), tail, e(f"setp.gt.{t}", x, 0.0))

    return lower


def _normal_tail_f32(e: Emitter, x: str) -> str:
    """The distribution function at -|x|, as _erfc_tail; exp(-s) without a reduction of its range: half of the exponent -s log2e is rounded
    to h, which is never so small that 2^h would be subnormal, and 2^h (2^h (1 + rest)) holds what h lost."""
    a = minimum(e, e("abs.f32", x), 16.5, "f32")
    scaled = e("mul.rn.f32", a, -0.5)
    square = e("mul.rn.f32", a, scaled)  # -s
    low = e("fma.rn.f32", a, scaled, e("neg.f32", square))
    half = e("mul.rn.f32", square, LOG2E / 2)
    rest = e("fma.rn.f32", square, LOG2E / 2, e("neg.f32", half))
    rest = e("fma.rn.f32", square, LOG2E_LOW / 2, rest)
    rest = e("fma.rn.f32", rest, 2 * LN2, low)
    root = e("ex2.approx.ftz.f32", half)
    r = e("rcp.approx.ftz.f32", e("fma.rn.f32", a, 0.7071067811865476, 3.0))
    u = e("fma.rn.f32", r, -6.0, 1.0)
    scale = e("mul.rn.f32", e.polynomial(u, [0.5 * k for k in ERFCX_F32], "f32"), r)
    return e("mul.rn.f32", e("mul.rn.f32", scale, root), e("fma.rn.f32", rest, root, root))


def erf_f32(e: Emitter, x: str) -> str:
    z = e("mul.rn.f32", x, x)
    small = e("fma.rn.f32", e.polynomial(z, ERF_F32, "f32"), x, x)
    a = minimum(e, e("abs.f32", x), 4.0, "f32")
    tail = e("ex2.approx.ftz.f32", e("mul.rn.f32", a, e.polynomial(a, ERFC_LOG2_F32, "f32")))
    return e("copysign.f32", x, e("selp.f32", small, e("sub.rn.f32", 1.0, tail), e("setp.lt.f32", a, 1.0)))


def erf_f64(e: Emitter, x: str) -> str:
    a = e("abs.f64", x)
    small = e("fma.rn.f64", e.polynomial(e("mul.rn.f64", x, x), ERF_F64, "f64"), x, x)
    large = e("sub.rn.f64", 1.0, _erfc_tail(e, a, False, "f64"))
    return e("copysign.f64", x, e("selp.f64", small, large, e("setp.lt.f64", a, 1.0)))


def _reduce_angle(e: Emitter, x: str) -> tuple[str, str]:
    """(r, quadrant): x = quadrant * pi/2 + r in f64, pi/2 in three parts, for |x| <= 2^50 (NaN beyond); quadrant modulo 2^32."""
    x = e("selp.f64", x, NAN, e("setp.le.f64", e("abs.f64", x), 2.0**50))
    n = e("cvt.rni.f64.f64", e("mul.rn.f64", x, 0.6366197723675814))
    minus = e("neg.f64", n)
    r = e("fma.rn.f64", minus, 1.5707963267948966, x)
    r = e("fma.rn.f64", minus, 6.123233995736766e-17, r)
    return e("fma.rn.f64", minus, -1.4973849048591833e-33, r), e("cvt.u32.u64", e("cvt.rni.s64.f64", n))


def sine(t: str, shift: int) -> Callable[[Emitter, str], str]:
    """sin (shift 0) and cos (shift 1): the angle is reduced in f64, the polynomials are evaluated in t."""

    def lower(e: Emitter, x: str) -> str:
        r, quadrant = _reduce_angle(e, x if t == "f64" else e("cvt.f64.f32", x))
        if t == "f32":
            r = e("cvt.rn.f32.f64", r)
        if shift:
            quadrant = e("add.s32", quadrant, shift)
        z = e(f"mul.rn.{t}", r, r)
        sin = e(f"fma.rn.{t}", e(f"mul.rn.{t}", e.polynomial(z, SIN_F32 if t == "f32" else SIN_F64, t), z), r, r)
        cos = e.polynomial(z, COS_F32 if t == "f32" else COS_F64, t)
        cos = e(f"fma.rn.{t}", e(f"fma.rn.{t}", cos, z, -0.5), z, 1.0)
        value = e(f"selp.{t}", cos, sin, e("setp.ne.s32", e("and.b32", quadrant, 1), 0))
        value = e(f"selp.{t}", e(f"neg.{t}", value), value, e("setp.ne.s32", e("and.b32", quadrant, 2), 0))
        return value if shift else _keep_tiny(e, x, value, 2.0**-14 if t == "f32" else 2.0**-28, t)

    return lower


def cos_turn(t: str) -> Callable[[Emitter, str], str]:
    """cos(2 pi x) = sin(2 pi c), c = 1/4 - |x - rint(x)|: c is exact, and small where the result is."""

    def lower(e: Emitter, x: str) -> str:
        c = e(f"sub.rn.{t}", 0.25, e(f"abs.{t}", e(f"sub.rn.{t}", x, e(f"cvt.rni.{t}.{t}", x))))
        if t == "f64":
            return sine(t, 0)(e, e("mul.rn.f64", c, 6.283185307179586))
        return e("mul.rn.f32", e.polynomial(e("mul.rn.f32", c, c), SIN_TURN_F32, "f32"), c)

    return lower


def arctan(t: str) -> Callable[[Emitter, str], str]:
    """atan|x| = base + atan(u), |u| <= tan(pi/8): u = -1/x beyond tan(3 pi/8), (x - 1)/(x + 1) beyond tan(pi/8), else x itself."""

    def lower(e: Emitter, x: str) -> str:
        a = e(f"abs.{t}", x)
        middle, far = e(f"setp.gt.{t}", a, 0.41421356237309503), e(f"setp.gt.{t}", a, 2.414213562373095)
        top = e(f"selp.{t}", -1.0, e(f"selp.{t}", e(f"sub.rn.{t}", a, 1.0), a, middle), far)
        bottom = e(f"selp.{t}", a, e(f"selp.{t}", e(f"add.rn.{t}", a, 1.0), 1.0, middle), far)
        base = e(f"selp.{t}", 1.5707963267948966, e(f"selp.{t}", 0.7853981633974483, 0.0, middle), far)
        u = e(f"div.rn.{t}", top, bottom)
        z = e(f"mul.rn.{t}", u, u)
        part = e(f"fma.rn.{t}", e(f"mul.rn.{t}", e.polynomial(z, ATAN_F32 if t == "f32" else ATAN_F64, t), z), u, u)
        return e(f"copysign.{t}", x, e(f"add.rn.{t}", base, part))

    return lower


def _arcsin_core(e: Emitter, x: str, t: str) -> str:
    """asin(x) for 0 <= x <= 1/2."""
    z = e(f"mul.rn.{t}", x, x)
    return e(f"fma.rn.{t}", e(f"mul.rn.{t}", e.polynomial(z, ASIN_F32 if t == "f32" else ASIN_F64, t), z), x, x)


def arcsin(t: str) -> Callable[[Emitter, str], str]:
    """Beyond 1/2: asin|x| = pi/2 - 2 asin(sqrt((1 - |x|)/2)). NaN outside [-1, 1], from the square root."""

    def lower(e: Emitter, x: str) -> str:
        a = e(f"abs.{t}", x)
        outer = e(f"setp.gt.{t}", a, 0.5)
        root = e(f"sqrt.rn.{t}", e(f"fma.rn.{t}", a, -0.5, 0.5))
        part = _arcsin_core(e, e(f"selp.{t}", root, a, outer), t)
        value = e(f"selp.{t}", e(f"fma.rn.{t}", part, -2.0, 1.5707963267948966), part, outer)
        return e(f"copysign.{t}", x, value)

    return lower


def arccos(t: str) -> Callable[[Emitter, str], str]:
    """pi/2 - asin(x) within 1/2, 2 asin(sqrt((1 - x)/2)) above, and pi minus that of -x below."""

    def lower(e: Emitter, x: str) -> str:
        a = e(f"abs.{t}", x)
        outer, negative = e(f"setp.gt.{t}", a, 0.5), e(f"setp.lt.{t}", x, 0.0)
        root = e(f"sqrt.rn.{t}", e(f"fma.rn.{t}", a, -0.5, 0.5))
        part = _arcsin_core(e, e(f"selp.{t}", root, a, outer), t)
        twice = e(f"add.rn.{t}", part, part)
        far = e(f"selp.{t}", e(f"sub.rn.{t}", 3.141592653589793, twice), twice, negative)
        near = e(f"sub.rn.{t}", 1.5707963267948966, e(f"copysign.{t}", x, part))
        return e(f"selp.{t}", far, near, outer)

    return lower


def power(t: str) -> Callable[[Emitter, str, str], str]:
    """|x|^y = exp(y log|x|) in f64, then the sign and IEEE's special cases."""

    def lower(e: Emitter, base: str, exponent: str) -> str:
        x, y = (base, exponent) if t == "f64" else (e("cvt.f64.f32", base), e("cvt.f64.f32", exponent))
        a = e("abs.f64", x)
        value = exp_f64(e, e("mul.rn.f64", y, log_f64(e, a)))
        whole = e("setp.eq.f64", e("cvt.rzi.f64.f64", y), y)
        half = e("mul.rn.f64", y, 0.5)
        odd = e("and.pred", whole, e("setp.ne.f64", e("cvt.rzi.f64.f64", half), half))
        value = e("selp.f64", e("copysign.f64", x, value), value, odd)
        finite = e("setp.lt.f64", a, INF)
        lost = e("and.pred", e("and.pred", e("setp.lt.f64", x, 0.0), finite), e("not.pred", whole))
        value = e("selp.f64", NAN, value, lost)
        one = e("or.pred", e("setp.eq.f64", x, 1.0), e("setp.eq.f64", y, 0.0))
        both = e("and.pred", e("setp.eq.f64", a, 1.0), e("setp.eq.f64", e("abs.f64", y), INF))
        value = e("selp.f64", 1.0, value, e("or.pred", one, both))
        return value if t == "f64" else e("cvt.rn.f32.f64", value)

    return lower


def _rest_f64(e: Emitter, x: str, y: str) -> str:
    """The exact rest of x/y for x, y >= 0; NaN for an infinite x, y = 0 and NaN.

    For j from the 48ths of the difference of exponents down to 0 a multiple of y 2^(48 j) is taken away: quotients are below 2^50, so fma
    leaves the rest exactly, and where a quotient was rounded up to the next integer it is less than one multiple below 0. Most often j = 0.
    """
    small = e("setp.lt.f64", y, 2.0**-1022)
    grown = e("selp.f64", e("mul.rn.f64", y, 2.0**54), y, small)  # a normal number
    shift = e("selp.b32", 54, 0, small)

    def exponent(value: str) -> str:
        return e("cvt.u32.u64", e("shr.u64", e("mov.b64", value), 52))

    last = e("sub.s32", e("add.s32", exponent(x), shift), exponent(grown))
    j = e("mov.b32", e("div.s32", e("max.s32", last, 0), 48))
    rest, label = e("mov.f64", x), f"{e.prefix.replace('%', '$')}rest_{e.register('b32')[len(e.prefix):]}"
    proper = e("and.pred", e("setp.gt.f64", y, 0.0), e("setp.lt.f64", x, INF))
    more = e("setp.ge.and.f64", x, y, proper, to="pred")
    e.lines += [f"@!{more} bra {label}_done;", f"{label}:"]
    k = e("sub.s32", e("mul.lo.s32", j, 48), shift)
    half = e("shr.s32", k, 1)
    multiple = e("mul.rn.f64", grown, _power_of_two_f64(e, half))
    multiple = e("mul.rn.f64", multiple, _power_of_two_f64(e, e("sub.s32", k, half)))
    quotient = e("cvt.rzi.f64.f64", e("div.rn.f64", rest, multiple))
    left = e("fma.rn.f64", e("neg.f64", quotient), multiple, rest)
    below = e("setp.lt.f64", left, 0.0)
    e.lines += [f"@{below} add.rn.f64 {left}, {left}, {multiple};", f"mov.f64 {rest}, {left};", f"add.s32 {j}, {j}, -1;"]
    more = e("setp.ge.s32", j, 0)
    e.lines += [f"@{more} bra {label};", f"{label}_done:"]
    return e("selp.f64", rest, NAN, proper)


def modulo(t: str) -> Callable[[Emitter, str, str], str]:
    """The exact rest of x/y with the sign of y, as NumPy's mod: of sizes; |y| less it where the signs differ and it is not 0."""

    def lower(e: Emitter, a: str, b: str) -> str:
        if t == "u64":
            return e("rem.u64", a, b)
        if t in ("s32", "s64"):
            rest = e(f"rem.{t}", a, b)
            differ = e(f"setp.lt.{t}", e(f"xor.{'b' + t[1:]}", rest, b), 0)
            fix = e("and.pred", differ, e(f"setp.ne.{t}", rest, 0))
            return e(f"selp.{'b' + t[1:]}", e(f"add.{t}", rest, b), rest, fix)
        x, y = (a, b) if t == "f64" else (e("cvt.f64.f32", a), e("cvt.f64.f32", b))
        size = e("abs.f64", y)
        rest = _rest_f64(e, e("abs.f64", x), size)
        opposite = e("setp.lt.f64", e("mul.rn.f64", e("copysign.f64", x, 1.0), e("copysign.f64", y, 1.0)), 0.0)
        turned = e("and.pred", opposite, e("setp.gt.f64", rest, 0.0))
        rest = e("copysign.f64", y, e("selp.f64", e("sub.rn.f64", size, rest), rest, turned))
        return rest if t == "f64" else e("cvt.rn.f32.f64", rest)

    return lower


def cbrt(t: str) -> Callable[[Emitter, str], str]:
    """|x|^(1/3) by logarithms, then a step of Newton: y - (y - |x|/y^2)/3; 0, infinities and NaN are their own roots."""

    def lower(e: Emitter, x: str) -> str:
        a = e(f"abs.{t}", x)
        if t == "f32":
            y = e("ex2.approx.f32", e("mul.rn.f32", e("lg2.approx.f32", a), 1 / 3))
        else:
            y = exp_f64(e, e("mul.rn.f64", log_f64(e, a), 1 / 3))
        error = e(f"sub.rn.{t}", y, e(f"div.rn.{t}", a, e(f"mul.rn.{t}", y, y)))
        root = e(f"copysign.{t}", x, e(f"fma.rn.{t}", error, -1 / 3, y))
        inside = e("and.pred", e(f"setp.gt.{t}", a, 0.0), e(f"setp.lt.{t}", a, INF))
        return e(f"selp.{t}", root, x, inside)

    return lower


def _sin_pi_f64(e: Emitter, x: str) -> str:
    """|sin(pi x)|, with full relative accuracy beside the integers."""
    r = e("abs.f64", e("sub.rn.f64", x, e("cvt.rni.f64.f64", x)))
    return sine("f64", 0)(e, e("mul.rn.f64", r, 3.141592653589793))


def _lgamma_positive_f64(e: Emitter, x: str) -> str:
    """log Gamma(x) for x > 0.

    Q(z) = lgamma(2 + z)/z. Below 1/2, z = x: z Q(z) - log(x (1 + x)); to 1.5, z = x - 1: z Q(z) - log x; to 2.5, z = x - 2: z Q(z);
    to 9.5: lgamma(x - k) + log((x - 1)...(x - k)); beyond, Stirling: (x - 1/2) log x - x + log(2 pi)/2 + 1/(12 x) - ...
    """
    rest, product = x, "0d3FF0000000000000"
    for _ in range(7):
        above = e("setp.gt.f64", rest, 2.5)
        lower = e("add.rn.f64", rest, -1.0)
        product = e("selp.f64", e("mul.rn.f64", product, lower), product, above)
        rest = e("selp.f64", lower, rest, above)
    small, tiny = e("setp.lt.f64", x, 1.5), e("setp.lt.f64", x, 0.5)
    z = e("selp.f64", x, e("selp.f64", e("add.rn.f64", x, -1.0), e("add.rn.f64", rest, -2.0), small), tiny)
    below = e("selp.f64", e("fma.rn.f64", x, x, x), x, tiny)
    far = e("setp.gt.f64", x, 9.5)
    size = log_f64(e, e("selp.f64", x, e("selp.f64", below, product, small), far))
    near = e("fma.rn.f64", z, e.polynomial(z, LGAMMA_F64, "f64"), e("selp.f64", e("neg.f64", size), size, small))
    r = e("rcp.rn.f64", x)
    series = e("mul.rn.f64", e.polynomial(e("mul.rn.f64", r, r), STIRLING, "f64"), r)
    large = e("add.rn.f64", e("fma.rn.f64", e("add.rn.f64", x, -0.5), e("add.rn.f64", size, -1.0), 0.4189385332046727), series)
    return e("selp.f64", large, near, far)


def lgamma(t: str) -> Callable[[Emitter, str], str]:
    """log|Gamma(x)|; negative x by reflection: log pi - log|sin pi x| - lgamma(1 - x). Infinite at the poles and at both infinities."""

    def lower(e: Emitter, argument: str) -> str:
        x = argument if t == "f64" else e("cvt.f64.f32", argument)
        negative = e("setp.lt.f64", x, 0.0)
        inner = _lgamma_positive_f64(e, e("selp.f64", e("sub.rn.f64", 1.0, x), x, negative))
        turned = _sin_pi_f64(e, x)
        tiny = e("setp.lt.f64", e("abs.f64", x), 2.0**-300)  # sin(pi x) is pi x, without its rounding below 2^-1022
        log_pi = e("selp.f64", 0.0, 1.1447298858494002, tiny)
        reflected = e("sub.rn.f64", e("sub.rn.f64", log_pi, log_f64(e, e("selp.f64", e("abs.f64", x), turned, tiny))), inner)
        value = e("selp.f64", reflected, inner, negative)
        size = e("abs.f64", x)
        pole = e("and.pred", e("setp.le.f64", x, 0.0), e("setp.eq.f64", turned, 0.0))
        endless = e("or.pred", e("setp.eq.f64", size, INF), pole)
        value = e("selp.f64", INF, value, endless)
        return value if t == "f64" else e("cvt.rn.f32.f64", value)

    return lower


def _moved_up(e: Emitter, x: str) -> tuple[str, str, str, str]:
    """(x < 0, x or its reflection 1 - x, whether that lies below 10, that and 10 more if so): where the asymptotic series hold."""
    negative = e("setp.lt.f64", x, 0.0)
    inner = e("selp.f64", e("sub.rn.f64", 1.0, x), x, negative)
    low = e("setp.lt.f64", inner, 10.0)
    return negative, inner, low, e("selp.f64", e("add.rn.f64", inner, 10.0), inner, low)


def digamma(t: str) -> Callable[[Emitter, str], str]:
    """psi(x) = psi(x + 10) - sum of 1/(x + k); there log x - 1/(2x) - 1/(12 x^2) + ...; negative x: psi(1 - x) - pi / tan(pi x).

    The reciprocals are added as one fraction, terms of two at a time: 1/a + 1/b = (a + b)/(a b).
    """

    def lower(e: Emitter, argument: str) -> str:
        x = argument if t == "f64" else e("cvt.f64.f32", argument)
        negative, inner, low, moved = _moved_up(e, x)
        total: str | float = 0.0
        for k in range(0, 10, 2):
            a, b = (e("add.rn.f64", inner, float(k)) if k else inner), e("add.rn.f64", inner, k + 1.0)
            total = e("add.rn.f64", total, e("div.rn.f64", e("add.rn.f64", a, b), e("mul.rn.f64", a, b)))
        r = e("rcp.rn.f64", moved)
        z = e("mul.rn.f64", r, r)
        value = e("fma.rn.f64", r, -0.5, log_f64(e, moved))
        value = e("sub.rn.f64", value, e("mul.rn.f64", z, e.polynomial(z, DIGAMMA, "f64")))
        value = e("sub.rn.f64", value, e("selp.f64", total, 0.0, low))
        turn = e("sub.rn.f64", x, e("cvt.rni.f64.f64", x))  # tan(pi x) has the period 1
        angle = e("mul.rn.f64", turn, 3.141592653589793)
        cotangent = e("div.rn.f64", sine("f64", 1)(e, angle), sine("f64", 0)(e, angle))
        value = e("selp.f64", e("fma.rn.f64", cotangent, -3.141592653589793, value), value, negative)
        pole = e("and.pred", negative, e("setp.eq.f64", turn, 0.0))
        value = e("selp.f64", NAN, value, pole)
        value = e("selp.f64", e("copysign.f64", e("neg.f64", x), INF), value, e("setp.eq.f64", x, 0.0))
        value = e("selp.f64", x, value, e("setp.eq.f64", x, INF))
        return value if t == "f64" else e("cvt.rn.f32.f64", value)

    return lower


def trigamma(t: str) -> Callable[[Emitter, str], str]:
    """psi'(x) = psi'(x + 10) + sum of 1/(x + k)^2; there 1/x + 1/(2 x^2) + 1/(6 x^3) - ...; below 0: (pi / sin(pi x))^2 - psi'(1 - x)."""

    def lower(e: Emitter, argument: str) -> str:
        x = argument if t == "f64" else e("cvt.f64.f32", argument)
        negative, inner, low, moved = _moved_up(e, x)
        total: str | float = 0.0
        for k in range(9, -1, -1):  # the small ones first
            r = e("rcp.rn.f64", e("add.rn.f64", inner, float(k)) if k else inner)
            total = e("fma.rn.f64", r, r, total)
        r = e("rcp.rn.f64", moved)
        z = e("mul.rn.f64", r, r)
        value = e("fma.rn.f64", e("mul.rn.f64", z, r), e.polynomial(z, TRIGAMMA, "f64"), e("fma.rn.f64", z, 0.5, r))
        value = e("add.rn.f64", value, e("selp.f64", total, 0.0, low))
        ratio = e("div.rn.f64", 3.141592653589793, _sin_pi_f64(e, x))
        value = e("selp.f64", e("sub.rn.f64", e("mul.rn.f64", ratio, ratio), value), value, negative)
        return value if t == "f64" else e("cvt.rn.f32.f64", value)

    return lower


def _mapped(e: Emitter, x: str, low: float, high: float, coefficients: Sequence[float], t: str) -> str:
    """The polynomial of x mapped from [low, high] to [-1, 1]."""
    u = e(f"fma.rn.{t}", x, 2 / (high - low), -(high + low) / (high - low))
    return e.polynomial(u, coefficients, t)


def erfinv(t: str) -> Callable[[Emitter, str], str]:
    """x P(w), w = -log((1 - x)(1 + x)); +-1 give infinities, beyond NaN."""

    def lower(e: Emitter, x: str) -> str:
        log = log_f32 if t == "f32" else log_f64
        w = e(f"neg.{t}", log(e, e(f"mul.rn.{t}", e(f"sub.rn.{t}", 1.0, x), e(f"add.rn.{t}", x, 1.0))))
        s = e(f"sqrt.rn.{t}", w)
        if t == "f32":
            p = _mapped(e, w, 0.0, 5.0, ERFINV_F32, t)
            tail = _mapped(e, s, 2.2360679774997896, 4.2, ERFINV_TAIL_F32, t)
            p = e("selp.f32", p, tail, e("setp.lt.f32", w, 5.0))
        else:
            p = _mapped(e, w, 0.0, 6.25, ERFINV_F64, t)
            tail = _mapped(e, s, 2.5, 4.0, ERFINV_TAIL_F64, t)
            far = _mapped(e, s, 4.0, 6.1, ERFINV_FAR_F64, t)
            p = e("selp.f64", p, e("selp.f64", tail, far, e("setp.lt.f64", s, 4.0)), e("setp.lt.f64", w, 6.25))
        value = e(f"mul.rn.{t}", x, p)
        return e(f"selp.{t}", e(f"copysign.{t}", x, INF), value, e(f"setp.eq.{t}", e(f"abs.{t}", x), 1.0))

    return lower


def fmod(t: str) -> Callable[[Emitter, str, str], str]:
    """The exact rest of x/y with the sign of x, as C's fmod."""

    def lower(e: Emitter, a: str, b: str) -> str:
        if t in ("s32", "s64", "u64"):
            return e(f"rem.{t}", a, b)
        x, y = (a, b) if t == "f64" else (e("cvt.f64.f32", a), e("cvt.f64.f32", b))
        rest = e("copysign.f64", x, _rest_f64(e, e("abs.f64", x), e("abs.f64", y)))
        return rest if t == "f64" else e("cvt.rn.f32.f64", rest)

    return lower


MOST_EVENTS = 4096  # of a quantile, so that every loop ends


def _quantile_f64(e: Emitter, u: str, first: str, step: Callable[[str], str], proper: str) -> str:
    """The smallest k with P(0) + ... + P(k) > u, where P(0) is `first` and P(k) = P(k - 1) * step(k); NaN unless `proper`."""
    k, chance, total = e("mov.f64", 0.0), e("mov.f64", first), e("mov.f64", first)
    label = f"{e.prefix.replace('%', '$')}quantile_{e.register('b32')[len(e.prefix):]}"
    more = e("setp.le.and.f64", total, u, proper, to="pred")
    e.lines += [f"@!{more} bra {label}_done;", f"{label}:", f"add.rn.f64 {k}, {k}, {literal(1.0, 'f64')};"]
    e.lines += [f"mul.rn.f64 {chance}, {chance}, {step(k)};", f"add.rn.f64 {total}, {total}, {chance};"]
    left = e("setp.lt.f64", k, float(MOST_EVENTS))
    more = e("setp.le.and.f64", total, u, left, to="pred")
    e.lines += [f"@{more} bra {label};", f"{label}_done:"]
    return e("selp.f64", k, NAN, proper)


def poisson_quantile(t: str) -> Callable[[Emitter, str, str], str]:
    """Of 0 <= u < 1 and 0 <= rate <= 700, whose e^-rate is a normal number."""

    def lower(e: Emitter, a: str, b: str) -> str:
        u, rate = (a, b) if t == "f64" else (e("cvt.f64.f32", a), e("cvt.f64.f32", b))
        proper = e("and.pred", e("setp.ge.f64", rate, 0.0), e("setp.le.f64", rate, 700.0))
        proper = e("and.pred", e("setp.ge.and.f64", u, 0.0, proper, to="pred"), e("setp.lt.f64", u, 1.0))
        k = _quantile_f64(e, u, exp_f64(e, e("neg.f64", rate)), lambda k: e("div.rn.f64", rate, k), proper)
        return k if t == "f64" else e("cvt.rn.f32.f64", k)

    return lower


def binomial_quantile(t: str) -> Callable[[Emitter, str, str, str], str]:
    """Of 0 <= u < 1, n >= 0 and 0 <= p <= 1/2, with (1 - p)^n at least e^-700."""

    def lower(e: Emitter, a: str, b: str, c: str) -> str:
        u, n, p = (a, b, c) if t == "f64" else (e("cvt.f64.f32", v) for v in (a, b, c))
        power = e("mul.rn.f64", n, log1p_f64(e, e("neg.f64", p)))
        proper = e("and.pred", e("setp.ge.f64", n, 0.0), e("setp.ge.f64", power, -700.0))
        proper = e("setp.ge.and.f64", p, 0.0, proper, to="pred")
        proper = e("setp.le.and.f64", p, 0.5, proper, to="pred")
        proper = e("and.pred", e("setp.ge.and.f64", u, 0.0, proper, to="pred"), e("setp.lt.f64", u, 1.0))
        odds, beyond = e("div.rn.f64", p, e("sub.rn.f64", 1.0, p)), e("add.rn.f64", n, 1.0)

        def step(k: str) -> str:
            return e("mul.rn.f64", e("div.rn.f64", e("sub.rn.f64", beyond, k), k), odds)

        k = e("min.f64", _quantile_f64(e, u, exp_f64(e, power), step, proper), n)
        k = e("selp.f64", k, NAN, proper)
        return k if t == "f64" else e("cvt.rn.f32.f64", k)

    return lower


def nextafter(t: str) -> Callable[[Emitter, str, str], str]:
    """The neighbour of x on the way to y. The bits of floats of one sign count like integers: one more is further from 0."""

    def lower(e: Emitter, x: str, y: str) -> str:
        b = "b" + t[1:]
        bits = e(f"mov.{b}", x)
        outwards = e("xor.pred", e(f"setp.gt.{t}", y, x), e(f"setp.lt.{t}", x, 0.0))  # x and y differ
        moved = e(f"mov.{t}", e(f"add.s{t[1:]}", bits, e(f"selp.{b}", 1, -1, outwards)))
        least = e(f"copysign.{t}", y, 2.0**-149 if t == "f32" else 2.0**-1074)
        moved = e(f"selp.{t}", least, moved, e(f"setp.eq.{t}", x, 0.0))
        moved = e(f"selp.{t}", y, moved, e(f"setp.eq.{t}", x, y))
        return e(f"selp.{t}", e(f"add.rn.{t}", x, y), moved, e(f"setp.nan.{t}", x, y))

    return lower


def ldexp(t: str) -> Callable[[Emitter, str, str], str]:
    """x * 2^n, n truncated to an integer, rounded once.

    f32: in f64, which holds the product. f64: below 2^-1022, or above 2^1023, in steps that leave x a normal number until the last.
    """

    def lower(e: Emitter, x: str, n: str) -> str:
        limit = 400.0 if t == "f32" else 2200.0
        k = e(f"cvt.rzi.s32.{t}", _clamp(e, n, -limit, limit, t))
        value = x if t == "f64" else e("cvt.f64.f32", x)
        for _ in range(2 if t == "f64" else 0):
            step = e("selp.b32", -969, e("selp.b32", 1023, 0, e("setp.gt.s32", k, 1023)), e("setp.lt.s32", k, -1022))
            value = e("mul.rn.f64", value, _power_of_two_f64(e, step))
            k = e("sub.s32", k, step)
        if t == "f64":
            k = e("max.s32", e("min.s32", k, 1023), -1022)
        value = e("mul.rn.f64", value, _power_of_two_f64(e, k))
        value = value if t == "f64" else e("cvt.rn.f32.f64", value)
        return e(f"selp.{t}", e(f"add.rn.{t}", x, n), value, e(f"setp.nan.{t}", x, n))

    return lower


def floor_divide(t: str) -> Callable[[Emitter, str, str], str]:
    """(a - mod(a, b)) / b, which is whole; by 0 the plain quotient, by an infinity 0, or -1 where the signs differ. Integers: the quotient
    towards 0, less 1 where something is left and the signs differ."""

    def lower(e: Emitter, a: str, b: str) -> str:
        if t == "u64":
            return e("div.u64", a, b)
        if t in ("s32", "s64"):
            untyped = "b" + t[1:]
            left = e("and.pred", e(f"setp.ne.{t}", e(f"rem.{t}", a, b), 0), e(f"setp.lt.{t}", e(f"xor.{untyped}", a, b), 0))
            return e(f"add.{t}", e(f"div.{t}", a, b), e(f"selp.{untyped}", -1, 0, left))
        rest = modulo(t)(e, a, b)
        x, y, rest = (a, b, rest) if t == "f64" else (e("cvt.f64.f32", v) for v in (a, b, rest))
        quotient = e("cvt.rni.f64.f64", e("div.rn.f64", e("sub.rn.f64", x, rest), y))
        endless = e("and.pred", e("setp.eq.f64", e("abs.f64", y), INF), e("setp.lt.f64", e("abs.f64", x), INF))
        differ = e("setp.lt.f64", e("mul.rn.f64", x, e("copysign.f64", y, 1.0)), 0.0)
        quotient = e("selp.f64", e("selp.f64", -1.0, 0.0, differ), quotient, endless)
        quotient = e("selp.f64", e("div.rn.f64", x, y), quotient, e("setp.eq.f64", y, 0.0))
        return quotient if t == "f64" else e("cvt.rn.f32.f64", quotient)

    return lower
