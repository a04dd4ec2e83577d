"""The instruction table as text: one row per form, `modifiers ; operands ; gate`.

Modifiers, in written order: `rn` must stand there, `rn|rz` is a choice, a trailing `?` makes it optional, `T:u32|s32`
binds the choice to a name, `B:=A` must be what A is, `S:!=D:u8|s8` must not be what D is, and `@name` is one of the
choices in MACROS.

Operands, separated by commas: `=` writes, `+` reads and writes, otherwise read. Then alternatives separated by `/`:
  T, u32      register of that type, or (for sources) an immediate; `2T` has twice the width; `T!` takes no immediate
  p           predicate                           =T_       a destination that may be the sink `_`
  =T|p, =T&p  a predicate may, must stand beside it  _         the sink only
  {4:b32}     vector of that many; {V:T} a scalar without modifier V, else as many as .v4 says; {N/2:T}, {2*N:T}
  pack        vector whose elements make up T    #, #4|8, #0..15   immediate, of these values
  label, sym  a label; a variable's address      desc      64-bit matrix descriptor of shared memory
  T~          the register may be wider than T   x8, x16, x32   exactly a .b8, .b16, .b32 register
  p^7.5       the alternative needs that PTX version
  [space access bytes ...]   address; access is r, w, a (read-modify-write) or h (a hint: nothing is read); bytes is a number,
              a type times a count (`T*V`), `#2` (what operand 2 says) or `?` (what a descriptor or tensor map says); `queued`
              is asynchronous through the generic proxy, `async` through the async proxy; `tensor D` in front of the space
              adds D coordinates.
`hint>u64` is there only if the modifier named hint is, `M=im2col>` only if M is that one; a trailing `?` is optional.

Gate: version@target, alternatives separated by blanks. `89+` is that architecture and later ones, `90a` that one only,
`100f` its family with an a or f suffix. Empty is 7.0@80+.
"""

# ruff: noqa: E501 -- one row of the table is one line

from __future__ import annotations

_INT = "u16|s16|u32|s32|u64|s64"
_ALL_INT = "u8|s8|" + _INT
_MEM = "b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64|b128"
_BLACKWELL = "8.6@100f 8.6@103f 8.7@120f"  # what all sm_100a-, 103a- and 120a-specific targets have


def _saturating() -> str:
    """The rows of integer cvt.sat: only where the destination cannot hold every source value."""
    rows = []
    for source in _ALL_INT.split("|"):
        bits = int(source[1:])
        holds = {
            kind
            for kind in _ALL_INT.split("|")
            if int(kind[1:]) >= bits + (source[0] != kind[0]) and not (source[0] == "s" and kind[0] == "u")
        }
        rows.append(f"cvt sat D:{'|'.join(sorted(set(_ALL_INT.split('|')) - holds))} S:{source} ; =D~, S~")
    return "\n".join(rows)


_SATURATING = _saturating()

MACROS = {
    "rnd": "rn|rz|rm|rp",
    "irnd": "rni|rzi|rmi|rpi",
    "int": _INT,
    "allint": _ALL_INT,
    "mem": _MEM,
    "scalar": "b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64",
    "space": "global|shared|shared::cta|shared::cluster|local|const|param",
    "stspace": "global|shared|shared::cta|shared::cluster|local",
    "sh": "shared|shared::cta",
    "atspace": "global|shared|shared::cta|shared::cluster",
    "scope": "cta|cluster|gpu|sys",
    "evict1": "L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate",
    "prefetch": "L2::64B|L2::128B|L2::256B",
    "dims": "1d|2d|3d|4d|5d",
    "icmp": "eq|ne|lt|le|gt|ge",
    "ucmp": "eq|ne|lt|le|gt|ge|lo|ls|hi|hs",
    "fcmp": "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan",
    "bool": "and|or|xor",
    "fp8": "e4m3|e5m2",
    "fp8x2": "e4m3x2|e5m2x2",
    "fp6x2": "e2m3x2|e3m2x2",
    "k16": "|".join(f"m64n{n}k16" for n in range(8, 257, 8)),
    "k8": "|".join(f"m64n{n}k8" for n in range(8, 257, 8)),
    "k32": "|".join(f"m64n{n}k32" for n in range(8, 257, 8)),
    "k32int": "|".join(f"m64n{n}k32" for n in (8, 16, 24, *range(32, 257, 16))),
}

#: Gates of single modifiers, in force besides the gate of the row.
MODIFIER_GATES = {
    "shared::cta": "7.8@80+",
    "shared::cluster": "7.8@90+",
    "cluster": "7.8@90+",
    "b128": "8.3@80+",
    "sys b128": "8.4@80+",  # both together
    "volatile local": "9.1@80+",
    "L1::evict_normal": "7.4@80+",
    "L1::evict_unchanged": "7.4@80+",
    "L1::evict_first": "7.4@80+",
    "L1::evict_last": "7.4@80+",
    "L1::no_allocate": "7.4@80+",
    "L2::cache_hint": "7.4@80+",
    "L2::64B": "7.4@80+",
    "L2::128B": "7.4@80+",
    "L2::256B": "7.4@80+",
    "multicast::cluster": "8.0@90+",
}

FORMS = f"""
# ---- moves and address arithmetic
mov pred ; =p, p
mov T:b16|b32|b64|b128 ; =T, T/pack/sym
mov T:b16|b32|b64|b128 ; =pack, T
mov T:u16|s16|u32|s32|u64|s64 ; =T, T/sym
mov T:f32|f64 ; =T, T
cvta S:global|shared|local|const|shared::cta|shared::cluster u64 ; =u64, u64/sym
cvta S:param u64 ; =u64, u64/sym ; 7.7@80+
cvta to S:global|shared|local|const|shared::cta|shared::cluster u64 ; =u64, u64
cvta to S:param u64 ; =u64, u64 ; 7.7@80+
isspacep global|shared|local|const|shared::cta|shared::cluster ; =p, u64
isspacep param ; =p, u64 ; 7.7@80+
mapa shared::cluster? T:u32|u64 ; =T, T/sym, u32 ; 7.8@90+
getctarank shared::cluster? T:u32|u64 ; =u32, T/sym ; 7.8@90+

# ---- loads and stores
ld weak? S:@space? cop:ca|cg|cs|lu|cv? V:v2|v4? T:@mem ; ={{V:T}}, [S r T*V]
ld weak? S:global? @evict1? hint:L2::cache_hint? @prefetch? V:v2|v4? T:@mem ; ={{V:T}}, [S r T*V], hint>u64
ld weak? S:global @evict1? L2::evict_last|L2::evict_first|L2::evict_normal? hint:L2::cache_hint? @prefetch? V:v8 T:b32|u32|s32|f32 ; ={{V:T}}, [S r T*V], hint>u64 ; 8.8@100+
ld weak? S:global @evict1? L2::evict_last|L2::evict_first|L2::evict_normal? hint:L2::cache_hint? @prefetch? V:v4 T:b64|u64|s64|f64 ; ={{V:T}}, [S r T*V], hint>u64 ; 8.8@100+
ld S:global cop:ca|cg|cs nc hint:L2::cache_hint? @prefetch? V:v2|v4? T:@mem ; ={{V:T}}, [S r T*V], hint>u64
ld S:global nc @evict1? hint:L2::cache_hint? @prefetch? V:v2|v4? T:@mem ; ={{V:T}}, [S r T*V], hint>u64
ld S:global nc @evict1? L2::evict_last|L2::evict_first|L2::evict_normal? hint:L2::cache_hint? @prefetch? V:v8 T:b32|u32|s32|f32 ; ={{V:T}}, [S r T*V], hint>u64 ; 8.8@100+
ld order:volatile S:@atspace|local? V:v2|v4? T:@mem ; ={{V:T}}, [S r T*V]
ld order:volatile S:global? @prefetch V:v2|v4? T:@mem ; ={{V:T}}, [S r T*V]
ld order:relaxed|acquire scope:@scope S:@atspace? V:v2|v4? T:@mem ; ={{V:T}}, [S r T*V]
ld order:relaxed|acquire scope:@scope S:global? @evict1? hint:L2::cache_hint? @prefetch? V:v2|v4? T:@mem ; ={{V:T}}, [S r T*V], hint>u64
ldu S:global? V:v2|v4? T:@mem ; ={{V:T}}, [S r T*V]
st weak? S:@stspace? cop:wb|cg|cs|wt? V:v2|v4? T:@mem ; [S w T*V], {{V:T}}
st weak? S:global? @evict1? hint:L2::cache_hint? V:v2|v4? T:@mem ; [S w T*V], {{V:T}}, hint>u64
st weak? S:global @evict1? L2::evict_last|L2::evict_first|L2::evict_normal? hint:L2::cache_hint? V:v8 T:b32|u32|s32|f32 ; [S w T*V], {{V:T}}, hint>u64 ; 8.8@100+
st weak? S:global @evict1? L2::evict_last|L2::evict_first|L2::evict_normal? hint:L2::cache_hint? V:v4 T:b64|u64|s64|f64 ; [S w T*V], {{V:T}}, hint>u64 ; 8.8@100+
st order:volatile S:@stspace? V:v2|v4? T:@mem ; [S w T*V], {{V:T}}
st order:relaxed|release scope:@scope S:@atspace? V:v2|v4? T:@mem ; [S w T*V], {{V:T}}
st order:relaxed|release scope:@scope S:global? @evict1? hint:L2::cache_hint? V:v2|v4? T:@mem ; [S w T*V], {{V:T}}, hint>u64
st async weak? S:shared::cluster done:mbarrier::complete_tx::bytes V:v2|v4? T:b32|u32|s32|f32|b64|u64|s64|f64 ; [S w T*V async], {{V:T}}, [S a 8 async] ; 8.1@90+
st bulk weak? S:shared::cta? ; [S w #1 async], u64, #0 ; 8.6@100+
prefetch S:global|local? L1|L2 ; [S h 0]
prefetch S:global L2::evict_last|L2::evict_normal ; [S h 0] ; 7.4@80+
prefetch tensormap ; [generic h 128] ; 8.0@90+
prefetchu L1 ; [generic h 0]
applypriority S:global? L2::evict_normal ; [S h 128], #128 ; 7.4@80+
discard S:global? L2 ; [S w 128], #128 ; 7.4@80+
createpolicy fractional L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged L2::evict_first|L2::evict_unchanged? b64 ; =u64, f32? ; 7.4@80+
createpolicy range global? L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged L2::evict_first|L2::evict_unchanged? b64 ; =u64, [global h 0], u32, u32 ; 7.4@80+

# ---- integer arithmetic
add T:{_INT} ; =T, T, T
add T:u16x2|s16x2 ; =T, T, T ; 8.0@90+
add sat s32 ; =s32, s32, s32
sub T:{_INT} ; =T, T, T
sub sat s32 ; =s32, s32, s32
mul lo|hi T:{_INT} ; =T, T, T
mul wide T:u16|s16|u32|s32 ; =2T, T, T
mad lo|hi T:{_INT} ; =T, T, T, T
mad hi sat s32 ; =s32, s32, s32, s32
mad wide T:u16|s16|u32|s32 ; =2T, T, T, 2T
mul24 lo|hi T:u32|s32 ; =T, T, T
mad24 lo|hi T:u32|s32 ; =T, T, T, T
mad24 hi sat s32 ; =s32, s32, s32, s32
sad T:{_INT} ; =T, T, T, T
div T:{_INT} ; =T, T, T
rem T:{_INT} ; =T, T, T
abs T:s16|s32|s64 ; =T, T
neg T:s16|s32|s64 ; =T, T
min T:{_INT} ; =T, T, T
min T:u16x2 ; =T, T, T ; 8.0@90+
min relu? T:s16x2 ; =T, T, T ; 8.0@90+
min relu s32 ; =s32, s32, s32 ; 8.0@90+
max T:{_INT} ; =T, T, T
max T:u16x2 ; =T, T, T ; 8.0@90+
max relu? T:s16x2 ; =T, T, T ; 8.0@90+
max relu s32 ; =s32, s32, s32 ; 8.0@90+
popc T:b32|b64 ; =u32, T
clz T:b32|b64 ; =u32, T
bfind shiftamt? T:u32|s32|u64|s64 ; =u32, T
brev T:b32|b64 ; =T, T
fns b32 ; =b32, b32, b32, s32
bfe T:u32|s32|u64|s64 ; =T, T, u32, u32
bfi T:b32|b64 ; =T, T, T, u32, u32
bmsk clamp|wrap b32 ; =u32, u32, u32 ; 7.6@80+
szext clamp|wrap T:u32|s32 ; =T, T, u32 ; 7.6@80+
dp4a u32|s32 u32|s32 ; =s32, s32, s32, s32
dp2a lo|hi u32|s32 u32|s32 ; =s32, s32, s32, s32
add cc T:u32|s32|u64|s64 ; =T, T, T
addc cc? T:u32|s32|u64|s64 ; =T, T, T
sub cc T:u32|s32|u64|s64 ; =T, T, T
subc cc? T:u32|s32|u64|s64 ; =T, T, T
mad lo|hi cc T:u32|s32|u64|s64 ; =T, T, T, T
madc lo|hi cc? T:u32|s32|u64|s64 ; =T, T, T, T

# ---- floating-point arithmetic
add @rnd? ftz? sat? T:f32 ; =T, T, T
add @rnd? T:f64 ; =T, T, T
add @rnd? ftz? T:f32x2 ; =T, T, T ; 8.6@100+
add rn? ftz? sat? T:f16|f16x2 ; =T, T, T
add rn? T:bf16|bf16x2 ; =T, T, T ; 7.8@90+
sub @rnd? ftz? sat? T:f32 ; =T, T, T
sub @rnd? T:f64 ; =T, T, T
sub @rnd? ftz? T:f32x2 ; =T, T, T ; 8.6@100+
sub rn? ftz? sat? T:f16|f16x2 ; =T, T, T
sub rn? T:bf16|bf16x2 ; =T, T, T ; 7.8@90+
mul @rnd? ftz? sat? T:f32 ; =T, T, T
mul @rnd? T:f64 ; =T, T, T
mul @rnd? ftz? T:f32x2 ; =T, T, T ; 8.6@100+
mul rn? ftz? sat? T:f16|f16x2 ; =T, T, T
mul rn? T:bf16|bf16x2 ; =T, T, T ; 7.8@90+
fma @rnd ftz? sat? T:f32 ; =T, T, T, T
fma @rnd T:f64 ; =T, T, T, T
fma @rnd ftz? T:f32x2 ; =T, T, T, T ; 8.6@100+
fma rn ftz? sat? T:f16|f16x2 ; =T, T, T, T
fma rn ftz? relu T:f16|f16x2 ; =T, T, T, T
fma rn relu? T:bf16|bf16x2 ; =T, T, T, T
fma rn oob relu? T:f16|f16x2|bf16|bf16x2 ; =T, T, T, T ; 8.1@90+
mad @rnd ftz? sat? T:f32 ; =T, T, T, T
mad @rnd T:f64 ; =T, T, T, T
div approx|full ftz? T:f32 ; =T, T, T
div @rnd ftz? T:f32 ; =T, T, T
div @rnd T:f64 ; =T, T, T
abs ftz? T:f32|f16|f16x2 ; =T, T
abs T:f64|bf16|bf16x2 ; =T, T
neg ftz? T:f32|f16|f16x2 ; =T, T
neg T:f64|bf16|bf16x2 ; =T, T
min ftz? NaN? T:f32|f16|f16x2 ; =T, T, T
min ftz? NaN? T:f32 ; =T, T, T, T ; 8.8@100+
min ftz? NaN? xorsign abs T:f32|f16|f16x2 ; =T, T, T ; 7.2@86+
min NaN? T:bf16|bf16x2 ; =T, T, T
min NaN? xorsign abs T:bf16|bf16x2 ; =T, T, T ; 7.2@86+
min T:f64 ; =T, T, T
max ftz? NaN? T:f32|f16|f16x2 ; =T, T, T
max ftz? NaN? T:f32 ; =T, T, T, T ; 8.8@100+
max ftz? NaN? xorsign abs T:f32|f16|f16x2 ; =T, T, T ; 7.2@86+
max NaN? T:bf16|bf16x2 ; =T, T, T
max NaN? xorsign abs T:bf16|bf16x2 ; =T, T, T ; 7.2@86+
max T:f64 ; =T, T, T
rcp approx ftz? T:f32 ; =T, T
rcp approx ftz T:f64 ; =T, T
rcp @rnd ftz? T:f32 ; =T, T
rcp @rnd T:f64 ; =T, T
sqrt approx ftz? T:f32 ; =T, T
sqrt @rnd ftz? T:f32 ; =T, T
sqrt @rnd T:f64 ; =T, T
rsqrt approx ftz? T:f32|f64 ; =T, T
sin approx ftz? T:f32 ; =T, T
cos approx ftz? T:f32 ; =T, T
lg2 approx ftz? T:f32 ; =T, T
ex2 approx ftz? T:f32 ; =T, T
ex2 approx T:f16|f16x2 ; =T, T
ex2 approx ftz T:bf16|bf16x2 ; =T, T ; 7.8@90+
tanh approx T:f32|f16|f16x2 ; =T, T
tanh approx T:bf16|bf16x2 ; =T, T ; 7.8@90+
copysign T:f32|f64 ; =T, T, T
testp finite|infinite|number|notanumber|normal|subnormal T:f32|f64 ; =p, T

# ---- comparison and selection
setp @icmp B:@bool? T:s16|s32|s64 ; =p_|p, T, T, B>p
setp @ucmp B:@bool? T:u16|u32|u64 ; =p_|p, T, T, B>p
setp eq|ne B:@bool? T:b16|b32|b64 ; =p_|p, T, T, B>p
setp @fcmp B:@bool? ftz? T:f32|f16x2 ; =p_|p, T, T, B>p
setp @fcmp B:@bool? ftz? T:f16 ; =p, T, T, B>p
setp @fcmp B:@bool? T:f64 ; =p_|p, T, T, B>p
setp @fcmp B:@bool? T:bf16 ; =p, T, T, B>p ; 7.8@90+
setp @fcmp B:@bool? T:bf16x2 ; =p_|p, T, T, B>p ; 7.8@90+
set @icmp B:@bool? D:u32|s32|f32 T:s16|s32|s64 ; =D, T, T, B>p
set @ucmp B:@bool? D:u32|s32|f32 T:u16|u32|u64 ; =D, T, T, B>p
set eq|ne B:@bool? D:u32|s32|f32 T:b16|b32|b64 ; =D, T, T, B>p
set @fcmp B:@bool? ftz? D:u32|s32|f32 T:f32 ; =D, T, T, B>p
set @fcmp B:@bool? D:u32|s32|f32 T:f64 ; =D, T, T, B>p
set @fcmp B:@bool? ftz? D:f16|u16|s16|u32|s32 T:f16 ; =D, T, T, B>p
set @fcmp B:@bool? ftz? D:f16x2 T:f16x2 ; =D, T, T, B>p
set @fcmp B:@bool? D:bf16|u16|s16|u32|s32 T:bf16 ; =D, T, T, B>p ; 7.8@90+
set @fcmp B:@bool? D:bf16x2 T:bf16x2 ; =D, T, T, B>p ; 7.8@90+
selp T:@scalar ; =T, T, T, p
slct T:@scalar s32 ; =T, T, T, s32
slct ftz? T:@scalar f32 ; =T, T, T, f32

# ---- logic, shifts, permutations
and T:b16|b32|b64 ; =T, T, T
and pred ; =p, p, p
or T:b16|b32|b64 ; =T, T, T
or pred ; =p, p, p
xor T:b16|b32|b64 ; =T, T, T
xor pred ; =p, p, p
not T:b16|b32|b64 ; =T, T
not pred ; =p, p
cnot T:b16|b32|b64 ; =T, T
shl T:b16|b32|b64 ; =T, T, u32
shr T:b16|b32|b64|u16|u32|u64|s16|s32|s64 ; =T, T, u32
shf l|r clamp|wrap b32 ; =b32, b32, b32, u32
lop3 b32 ; =b32, b32, b32, b32, #0..255
lop3 or|and b32 ; =b32_&p, b32, b32, b32, #0..255, p ; 8.2@80+
prmt b32 ; =b32, b32, b32, b32
prmt b32 f4e|b4e|rc8|ecl|ecr|rc16 ; =b32, b32, b32, b32

# ---- conversions
cvt D:@allint S:@allint ; =D~, S~
{_SATURATING}
cvt @irnd ftz? sat? D:@allint S:f32 ; =D~, S~
cvt @irnd sat? D:@allint S:f64|f16 ; =D~, S~
cvt @irnd D:@int S:bf16 ; =D, S ; 7.8@90+
cvt @rnd sat? D:f32|f64|f16 S:@allint ; =D~, S~
cvt @rnd D:bf16 S:@int ; =D, S~ ; 7.8@90+
cvt ftz? sat? D:f32 S:f16 ; =D~, S~
cvt @irnd? ftz? sat? D:f32 S:f32 ; =D~, S~
cvt @irnd? sat? D:f64 S:f64 ; =D~, S~
cvt @irnd? sat? D:f16 S:f16 ; =D~, S~
cvt @irnd? D:bf16 S:bf16 ; =D, S ; 7.8@90+
cvt ftz? sat? D:f64 S:f32 ; =D~, S~
cvt sat? D:f64 S:f16 ; =D~, S~
cvt @rnd ftz? sat? D:f32 S:f64 ; =D~, S~
cvt @rnd sat? D:f16 S:f64 ; =D~, S~
cvt @rnd ftz? sat? D:f16 S:f32 ; =D~, S~
cvt rn|rz relu D:f16 S:f32 ; =D~, S~
cvt rn|rz satfinite relu? D:f16 S:f32 ; =D~, S~ ; 8.1@80+
cvt f32 bf16 ; =f32, bf16 ; 7.1@80+
cvt f64 bf16 ; =f64, bf16 ; 7.8@90+
cvt @rnd D:bf16 S:f64|f16 ; =D, S ; 7.8@90+
cvt @rnd D:f16 S:bf16 ; =D, S ; 7.8@90+
cvt rn|rz relu? D:bf16 S:f32 ; =D, S
cvt rn|rz satfinite relu? D:bf16 S:f32 ; =D, S ; 8.1@80+
cvt rm|rp D:bf16 S:f32 ; =D, S
cvt rn|rz relu? D:f16x2 f32 ; =D, f32~, f32~
cvt rn|rz relu? D:bf16x2 f32 ; =D, f32, f32
cvt rn|rz satfinite relu? D:f16x2 f32 ; =D, f32~, f32~ ; 8.1@80+
cvt rn|rz satfinite relu? D:bf16x2 f32 ; =D, f32, f32 ; 8.1@80+
cvt rs relu? satfinite? D:f16x2 f32 ; =D, f32~, f32~, b32 ; 8.7@100a 8.7@103a
cvt rs relu? satfinite? D:bf16x2 f32 ; =D, f32, f32, b32 ; 8.7@100a 8.7@103a
cvt rs relu? satfinite e4m3x4|e5m2x4|e2m3x4|e3m2x4 f32 ; =x32, {{4:f32}}, b32 ; 8.7@100a 8.7@103a
cvt rna tf32 f32 ; =x32, f32
cvt rna satfinite tf32 f32 ; =x32, f32 ; 8.1@80+
cvt rn|rz relu? tf32 f32 ; =x32, f32 ; 7.8@90+
cvt rn|rz satfinite relu? tf32 f32 ; =x32, f32 ; 8.6@100+
cvt rn satfinite relu? @fp8x2 f32 ; =x16, f32, f32 ; 8.1@89+ 7.8@90+
cvt rn satfinite relu? @fp8x2 f16x2 ; =x16, f16x2 ; 8.1@89+ 7.8@90+
cvt rn relu? f16x2 @fp8x2 ; =f16x2, x16 ; 8.1@89+ 7.8@90+
cvt rn satfinite relu? e2m1x2 f32 ; =x8, f32, f32 ; {_BLACKWELL}
cvt rn satfinite relu? @fp6x2 f32 ; =x16, f32, f32 ; {_BLACKWELL}
cvt rn relu? f16x2 e2m1x2 ; =f16x2, x8 ; {_BLACKWELL}
cvt rn relu? f16x2 @fp6x2 ; =f16x2, x16 ; {_BLACKWELL}
cvt rz|rp satfinite? ue8m0x2 f32 ; =x16, f32, f32 ; {_BLACKWELL}
cvt rz|rp satfinite? ue8m0x2 bf16x2 ; =x16, bf16x2 ; {_BLACKWELL}
cvt rn bf16x2 ue8m0x2 ; =bf16x2, x16 ; {_BLACKWELL}
cvt pack sat u16|s16 s32 ; =u32~, s32, s32
cvt pack sat u8|s8|u4|s4|u2|s2 s32 b32 ; =u32~, s32, s32, b32

# ---- control flow
bra uni? ; label
ret uni? ; 
exit ; 
trap ; 
brkpt ; 
nanosleep u32 ; u32
pmevent ; #0..15
griddepcontrol launch_dependents|wait ; ; 7.8@90+
setmaxnreg inc|dec sync aligned u32 ; #24..256 ; 8.0@90a 8.6@100f 8.6@103f 8.7@120f

# ---- barriers and fences
bar sync ; u32, u32?
bar arrive ; u32, u32
bar red popc u32 ; =u32, u32, u32?, p
bar red and|or pred ; =p, u32, u32?, p
bar cta sync ; u32, u32? ; 7.8@80+
bar cta arrive ; u32, u32 ; 7.8@80+
bar warp sync ; u32
barrier sync aligned? ; u32, u32?
barrier arrive aligned? ; u32, u32
barrier red popc aligned? u32 ; =u32, u32, u32?, p
barrier red and|or aligned? pred ; =p, u32, u32?, p
barrier cta sync aligned? ; u32, u32? ; 7.8@80+
barrier cta arrive aligned? ; u32, u32 ; 7.8@80+
barrier cluster arrive aligned? ; ; 7.8@90+
barrier cluster arrive order:release|relaxed aligned? ; ; 8.0@90+
barrier cluster wait aligned? ; ; 7.8@90+
barrier cluster wait order:acquire aligned? ; ; 8.0@90+
membar cta|gl|sys ; 
fence order:sc|acq_rel? scope:@scope ; 
fence order:acquire|release scope:@scope ; ; 8.6@90+
fence proxy alias ; ; 7.5@80+
fence proxy async ; ; 8.0@90+
fence proxy async S:global|shared::cta|shared::cluster ; ; 8.0@90+
fence proxy tensormap::generic release scope:@scope ; ; 8.3@90+
fence proxy tensormap::generic acquire scope:@scope ; [generic h 128], #128 ; 8.3@90+
fence mbarrier_init release cluster ; ; 8.0@90+

# ---- warp-wide operations
activemask b32 ; =b32
vote sync all|any|uni pred ; =p, p, u32
vote sync ballot b32 ; =u32, p, u32
match any sync T:b32|b64 ; =u32, T, u32
match all sync T:b32|b64 ; =u32|p, T, u32
shfl sync up|down|bfly|idx b32 ; =b32|p, b32, b32, b32, b32
redux sync add|min|max T:u32|s32 ; =T, T, u32
redux sync and|or|xor b32 ; =u32, u32, u32
redux sync min|max abs? NaN? f32 ; =f32, f32, u32 ; 8.6@100a 8.6@103a 8.8@100f 8.8@103f
elect sync ; =u32_&p, u32 ; 8.0@90+

# ---- atomics
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:@atspace? op:add T:u32|s32|u64|f32|f64 ; =T_, [S a T], T
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:global? op:add hint:L2::cache_hint T:u32|s32|u64|f32|f64 ; =T_, [S a T], T, hint>u64
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:@atspace? op:min|max T:u32|s32|u64|s64 ; =T_, [S a T], T
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:global? op:min|max hint:L2::cache_hint T:u32|s32|u64|s64 ; =T_, [S a T], T, hint>u64
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:@atspace? op:inc|dec T:u32 ; =T_, [S a T], T
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:global? op:inc|dec hint:L2::cache_hint T:u32 ; =T_, [S a T], T, hint>u64
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:@atspace? op:and|or|xor T:b32|b64 ; =T_, [S a T], T
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:global? op:and|or|xor hint:L2::cache_hint T:b32|b64 ; =T_, [S a T], T, hint>u64
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:@atspace? op:exch T:b32|b64 ; =T_, [S a T], T
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:global? op:exch hint:L2::cache_hint T:b32|b64 ; =T_, [S a T], T, hint>u64
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:@atspace? op:exch T:b128 ; =T_, [S a T], T ; 8.3@90+
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:global? op:exch hint:L2::cache_hint T:b128 ; =T_, [S a T], T, hint>u64 ; 8.3@90+
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:@atspace? op:cas T:b16|b32|b64 ; =T_, [S a T], T, T
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:@atspace? op:cas T:b128 ; =T_, [S a T], T, T ; 8.3@90+
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:@atspace? op:add noftz T:f16|f16x2 ; =T_, [S a T], T
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:global? op:add noftz hint:L2::cache_hint T:f16|f16x2 ; =T_, [S a T], T, hint>u64
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:@atspace? op:add noftz T:bf16|bf16x2 ; =T_, [S a T], T ; 7.8@90+
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:global? op:add noftz hint:L2::cache_hint T:bf16|bf16x2 ; =T_, [S a T], T, hint>u64 ; 7.8@90+
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:global? op:add hint:L2::cache_hint? V:v2|v4 T:f32 ; ={{V:T}}, [S a T*V], {{V:T}}, hint>u64 ; 8.1@90+
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:global? op:add|min|max noftz hint:L2::cache_hint? V:v2|v4|v8 T:f16|bf16 ; ={{V:T}}, [S a T*V], {{V:T}}, hint>u64 ; 8.1@90+
atom order:relaxed|acquire|release|acq_rel? scope:@scope? S:global? op:add|min|max noftz hint:L2::cache_hint? V:v2|v4 T:f16x2|bf16x2 ; ={{V:T}}, [S a T*V], {{V:T}}, hint>u64 ; 8.1@90+
red order:relaxed|release? scope:@scope? S:@atspace? op:add T:u32|s32|u64|f32|f64 ; [S a T], T
red order:relaxed|release? scope:@scope? S:global? op:add hint:L2::cache_hint T:u32|s32|u64|f32|f64 ; [S a T], T, hint>u64
red order:relaxed|release? scope:@scope? S:@atspace? op:min|max T:u32|s32|u64|s64 ; [S a T], T
red order:relaxed|release? scope:@scope? S:global? op:min|max hint:L2::cache_hint T:u32|s32|u64|s64 ; [S a T], T, hint>u64
red order:relaxed|release? scope:@scope? S:@atspace? op:inc|dec T:u32 ; [S a T], T
red order:relaxed|release? scope:@scope? S:global? op:inc|dec hint:L2::cache_hint T:u32 ; [S a T], T, hint>u64
red order:relaxed|release? scope:@scope? S:@atspace? op:and|or|xor T:b32|b64 ; [S a T], T
red order:relaxed|release? scope:@scope? S:global? op:and|or|xor hint:L2::cache_hint T:b32|b64 ; [S a T], T, hint>u64
red order:relaxed|release? scope:@scope? S:@atspace? op:add noftz T:f16|f16x2 ; [S a T], T
red order:relaxed|release? scope:@scope? S:global? op:add noftz hint:L2::cache_hint T:f16|f16x2 ; [S a T], T, hint>u64
red order:relaxed|release? scope:@scope? S:@atspace? op:add noftz T:bf16|bf16x2 ; [S a T], T ; 7.8@90+
red order:relaxed|release? scope:@scope? S:global? op:add noftz hint:L2::cache_hint T:bf16|bf16x2 ; [S a T], T, hint>u64 ; 7.8@90+
red order:relaxed|release? scope:@scope? S:global? op:add hint:L2::cache_hint? V:v2|v4 T:f32 ; [S a T*V], {{V:T}}, hint>u64 ; 8.1@90+
red order:relaxed|release? scope:@scope? S:global? op:add|min|max noftz hint:L2::cache_hint? V:v2|v4|v8 T:f16|bf16 ; [S a T*V], {{V:T}}, hint>u64 ; 8.1@90+
red order:relaxed|release? scope:@scope? S:global? op:add|min|max noftz hint:L2::cache_hint? V:v2|v4 T:f16x2|bf16x2 ; [S a T*V], {{V:T}}, hint>u64 ; 8.1@90+
red async relaxed cluster S:shared::cluster done:mbarrier::complete_tx::bytes op:inc|dec T:u32 ; [S a T async], T, [S a 8 async] ; 8.1@90+
red async relaxed cluster S:shared::cluster done:mbarrier::complete_tx::bytes op:min|max T:u32|s32 ; [S a T async], T, [S a 8 async] ; 8.1@90+
red async relaxed cluster S:shared::cluster done:mbarrier::complete_tx::bytes op:add T:u32|s32|u64 ; [S a T async], T, [S a 8 async] ; 8.1@90+
red async relaxed cluster S:shared::cluster done:mbarrier::complete_tx::bytes op:and|or|xor T:b32 ; [S a T async], T, [S a 8 async] ; 8.1@90+

# ---- matrix fragments
ldmatrix sync aligned m8n8 N:x1|x2|x4 trans? S:@sh? b16 ; ={{N:b32}}, [S r 16]
ldmatrix sync aligned m16n16 N:x1|x2 trans S:@sh? b8 ; ={{2*N:b32}}, [S r 16] ; {_BLACKWELL}
stmatrix sync aligned m8n8 N:x1|x2|x4 trans? S:@sh? b16 ; [S w 16], {{N:b32}}! ; 7.8@90+
stmatrix sync aligned m16n8 N:x1|x2|x4 trans S:@sh? b8 ; [S w 16], {{N:b32}}! ; {_BLACKWELL}
movmatrix sync aligned m8n8 trans b16 ; =b32, b32! ; 7.8@80+
mma sync aligned m16n8k8 row col f32 f16 f16 f32 ; ={{4:f32}}, {{2:x32}}, {{1:x32}}, {{4:f32}}
mma sync aligned m16n8k8 row col f16 f16 f16 f16 ; ={{2:b32}}, {{2:x32}}, {{1:x32}}, {{2:x32}}
mma sync aligned m16n8k16 row col f32 f16 f16 f32 ; ={{4:f32}}, {{4:x32}}, {{2:x32}}, {{4:f32}}
mma sync aligned m16n8k16 row col f16 f16 f16 f16 ; ={{2:b32}}, {{4:x32}}, {{2:x32}}, {{2:x32}}
mma sync aligned m16n8k8 row col f32 bf16 bf16 f32 ; ={{4:f32}}, {{2:x32}}, {{1:x32}}, {{4:f32}}
mma sync aligned m16n8k16 row col f32 bf16 bf16 f32 ; ={{4:f32}}, {{4:x32}}, {{2:x32}}, {{4:f32}}
mma sync aligned m16n8k4 row col f32 tf32 tf32 f32 ; ={{4:f32}}, {{2:x32}}, {{1:x32}}, {{4:f32}}
mma sync aligned m16n8k8 row col f32 tf32 tf32 f32 ; ={{4:f32}}, {{4:x32}}, {{2:x32}}, {{4:f32}}
mma sync aligned m8n8k16 row col satfinite? s32 u8|s8 u8|s8 s32 ; ={{2:s32}}, {{1:x32}}, {{1:x32}}, {{2:s32}}
mma sync aligned m16n8k16 row col satfinite? s32 u8|s8 u8|s8 s32 ; ={{4:s32}}, {{2:x32}}, {{1:x32}}, {{4:s32}}
mma sync aligned m16n8k32 row col satfinite? s32 u8|s8 u8|s8 s32 ; ={{4:s32}}, {{4:x32}}, {{2:x32}}, {{4:s32}}
mma sync aligned m8n8k32 row col satfinite? s32 u4|s4 u4|s4 s32 ; ={{2:s32}}, {{1:x32}}, {{1:x32}}, {{2:s32}}
mma sync aligned m16n8k32 row col satfinite? s32 u4|s4 u4|s4 s32 ; ={{4:s32}}, {{2:x32}}, {{1:x32}}, {{4:s32}}
mma sync aligned m16n8k64 row col satfinite? s32 u4|s4 u4|s4 s32 ; ={{4:s32}}, {{4:x32}}, {{2:x32}}, {{4:s32}}
mma sync aligned m16n8k128 row col s32 b1 b1 s32 xor popc ; ={{4:s32}}, {{2:x32}}, {{1:x32}}, {{4:s32}}
mma sync aligned m16n8k256 row col s32 b1 b1 s32 xor popc ; ={{4:s32}}, {{4:x32}}, {{2:x32}}, {{4:s32}}
mma sync aligned m16n8k128 row col s32 b1 b1 s32 and popc ; ={{4:s32}}, {{2:x32}}, {{1:x32}}, {{4:s32}} ; 7.1@80+
mma sync aligned m16n8k256 row col s32 b1 b1 s32 and popc ; ={{4:s32}}, {{4:x32}}, {{2:x32}}, {{4:s32}} ; 7.1@80+
mma sync aligned m16n8k32 row col f32 @fp8 @fp8 f32 ; ={{4:f32}}, {{4:x32}}, {{2:x32}}, {{4:f32}} ; 8.4@89+
mma sync aligned m16n8k32 row col f16 @fp8 @fp8 f16 ; ={{2:b32}}, {{4:x32}}, {{2:x32}}, {{2:x32}} ; 8.7@89+
mma sync aligned m16n8k16 row col f32 @fp8 @fp8 f32 ; ={{4:f32}}, {{2:x32}}, {{1:x32}}, {{4:f32}} ; 8.7@89+
mma sync aligned m16n8k16 row col f16 @fp8 @fp8 f16 ; ={{2:b32}}, {{2:x32}}, {{1:x32}}, {{2:x32}} ; 8.7@89+
mma sync aligned m16n8k32 row col kind::f8f6f4 f32 e4m3|e5m2|e3m2|e2m3|e2m1 e4m3|e5m2|e3m2|e2m3|e2m1 f32 ; ={{4:f32}}, {{4:x32}}, {{2:x32}}, {{4:f32}} ; 8.7@120f
mma sync aligned m8n8k4 row col f64 f64 f64 f64 ; ={{2:f64}}, {{1:f64}}, {{1:f64}}, {{2:f64}}
mma sync aligned m16n8k4 row col f64 f64 f64 f64 ; ={{4:f64}}, {{2:f64}}, {{1:f64}}, {{4:f64}} ; 7.8@90+
mma sync aligned m16n8k8 row col f64 f64 f64 f64 ; ={{4:f64}}, {{4:f64}}, {{2:f64}}, {{4:f64}} ; 7.8@90+
mma sync aligned m16n8k16 row col f64 f64 f64 f64 ; ={{4:f64}}, {{8:f64}}, {{4:f64}}, {{4:f64}} ; 7.8@90+

# ---- wgmma: accumulators are read unless scale-d says otherwise
wgmma fence sync aligned ; ; 8.0@90a
wgmma commit_group sync aligned ; ; 8.0@90a
wgmma wait_group sync aligned ; #0..7 ; 8.0@90a
wgmma mma_async sync aligned N:@k16 f32 A:f16|bf16 B:=A ; +{{N/2:f32}}, desc, desc, p, #-1|1, #-1|1, #0|1, #0|1 ; 8.0@90a
wgmma mma_async sync aligned N:@k16 f32 A:f16|bf16 B:=A ; +{{N/2:f32}}, {{4:x32}}, desc, p, #-1|1, #-1|1, #0|1 ; 8.0@90a
wgmma mma_async sync aligned N:@k16 f16 f16 f16 ; +{{N/4:x32}}, desc, desc, p, #-1|1, #-1|1, #0|1, #0|1 ; 8.0@90a
wgmma mma_async sync aligned N:@k16 f16 f16 f16 ; +{{N/4:x32}}, {{4:x32}}, desc, p, #-1|1, #-1|1, #0|1 ; 8.0@90a
wgmma mma_async sync aligned N:@k8 f32 tf32 tf32 ; +{{N/2:f32}}, desc/{{4:x32}}, desc, p, #-1|1, #-1|1 ; 8.0@90a
wgmma mma_async sync aligned N:@k32 f32 @fp8 @fp8 ; +{{N/2:f32}}, desc/{{4:x32}}, desc, p, #-1|1, #-1|1 ; 8.0@90a
wgmma mma_async sync aligned N:@k32 f16 @fp8 @fp8 ; +{{N/4:x32}}, desc/{{4:x32}}, desc, p, #-1|1, #-1|1 ; 8.0@90a
wgmma mma_async sync aligned N:@k32int satfinite? s32 A:u8|s8 B:=A ; +{{N/2:s32}}, desc/{{4:x32}}, desc, p ; 8.0@90a
wgmma mma_async sync aligned N:@k32int satfinite? s32 A:u8|s8 B:!=A:u8|s8 ; +{{N/2:s32}}, desc/{{4:x32}}, desc, p ; 8.4@90a

# ---- asynchronous copies of a thread
cp async L:ca S:@sh global hint:L2::cache_hint? @prefetch? ; [S w #2 queued], [global r #2 queued], #4|8|16, u32/p^7.5?, hint>u64
cp async L:cg S:@sh global hint:L2::cache_hint? @prefetch? ; [S w #2 queued], [global r #2 queued], #16, u32/p^7.5?, hint>u64
cp async commit_group ; 
cp async wait_group ; #0..255
cp async wait_all ; 
cp async mbarrier arrive noinc? S:@sh? b64 ; [S a 8 queued]

# ---- mbarrier
mbarrier init S:@sh? b64 ; [S w 8], u32
mbarrier inval S:@sh? b64 ; [S w 8]
mbarrier arrive S:@sh? b64 ; =u64, [S a 8]
mbarrier arrive S:@sh? b64 ; =u64_, [S a 8] ; 7.1@80+
mbarrier arrive S:@sh? b64 ; =u64_, [S a 8], u32 ; 7.8@90+
mbarrier arrive S:shared::cluster b64 ; _, [S a 8], u32? ; 8.0@90+
mbarrier arrive order:release scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8] ; 8.0@80+
mbarrier arrive order:release scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8], u32 ; 8.0@90+
mbarrier arrive order:relaxed scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8] ; 8.6@90+
mbarrier arrive order:relaxed scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8], u32 ; 8.6@90+
mbarrier arrive order:release scope:cta|cluster S:shared::cluster b64 ; _, [S a 8], u32? ; 8.0@90+
mbarrier arrive order:relaxed scope:cta|cluster S:shared::cluster b64 ; _, [S a 8], u32? ; 8.6@90+
mbarrier arrive expect_tx S:@sh? b64 ; =u64_, [S a 8], u32 ; 8.0@90+
mbarrier arrive expect_tx order:release scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8], u32 ; 8.0@90+
mbarrier arrive expect_tx order:relaxed scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8], u32 ; 8.6@90+
mbarrier arrive expect_tx S:shared::cluster b64 ; _, [S a 8], u32 ; 8.0@90+
mbarrier arrive expect_tx order:release scope:cta|cluster S:shared::cluster b64 ; _, [S a 8], u32 ; 8.0@90+
mbarrier arrive expect_tx order:relaxed scope:cta|cluster S:shared::cluster b64 ; _, [S a 8], u32 ; 8.6@90+
mbarrier arrive noComplete S:@sh? b64 ; =u64, [S a 8], u32
mbarrier arrive noComplete order:release scope:cta S:@sh? b64 ; =u64, [S a 8], u32 ; 8.0@80+
mbarrier arrive_drop S:@sh? b64 ; =u64_, [S a 8]
mbarrier arrive_drop S:@sh? b64 ; =u64_, [S a 8], u32 ; 7.8@90+
mbarrier arrive_drop S:shared::cluster b64 ; _, [S a 8], u32? ; 8.0@90+
mbarrier arrive_drop order:release scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8] ; 8.0@80+
mbarrier arrive_drop order:release scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8], u32 ; 8.0@90+
mbarrier arrive_drop order:relaxed scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8] ; 8.6@90+
mbarrier arrive_drop order:relaxed scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8], u32 ; 8.6@90+
mbarrier arrive_drop expect_tx S:@sh? b64 ; =u64_, [S a 8], u32 ; 8.0@90+
mbarrier arrive_drop expect_tx order:release scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8], u32 ; 8.0@90+
mbarrier arrive_drop expect_tx order:relaxed scope:cta|cluster S:@sh? b64 ; =u64_, [S a 8], u32 ; 8.6@90+
mbarrier arrive_drop noComplete S:@sh? b64 ; =u64, [S a 8], u32
mbarrier expect_tx S:shared|shared::cta|shared::cluster? b64 ; [S a 8], u32 ; 8.0@90+
mbarrier expect_tx order:relaxed scope:cta|cluster S:shared|shared::cta|shared::cluster? b64 ; [S a 8], u32 ; 8.0@90+
mbarrier complete_tx S:shared|shared::cta|shared::cluster? b64 ; [S a 8], u32 ; 8.0@90+
mbarrier complete_tx order:relaxed scope:cta|cluster S:shared|shared::cta|shared::cluster? b64 ; [S a 8], u32 ; 8.0@90+
mbarrier test_wait S:@sh? b64 ; =p, [S r 8], u64
mbarrier test_wait order:acquire scope:cta|cluster S:@sh? b64 ; =p, [S r 8], u64 ; 8.0@80+
mbarrier test_wait order:relaxed scope:cta|cluster S:@sh? b64 ; =p, [S r 8], u64 ; 8.6@90+
mbarrier test_wait parity S:@sh? b64 ; =p, [S r 8], u32 ; 7.1@80+
mbarrier test_wait parity order:acquire scope:cta|cluster S:@sh? b64 ; =p, [S r 8], u32 ; 8.0@80+
mbarrier test_wait parity order:relaxed scope:cta|cluster S:@sh? b64 ; =p, [S r 8], u32 ; 8.6@90+
mbarrier try_wait S:@sh? b64 ; =p, [S r 8], u64, u32? ; 7.8@90+
mbarrier try_wait order:acquire scope:cta|cluster S:@sh? b64 ; =p, [S r 8], u64, u32? ; 8.0@90+
mbarrier try_wait order:relaxed scope:cta|cluster S:@sh? b64 ; =p, [S r 8], u64, u32? ; 8.6@90+
mbarrier try_wait parity S:@sh? b64 ; =p, [S r 8], u32, u32? ; 7.8@90+
mbarrier try_wait parity order:acquire scope:cta|cluster S:@sh? b64 ; =p, [S r 8], u32, u32? ; 8.0@90+
mbarrier try_wait parity order:relaxed scope:cta|cluster S:@sh? b64 ; =p, [S r 8], u32, u32? ; 8.6@90+
mbarrier pending_count b64 ; =u32, u64

# ---- bulk copies and tensor copies
cp async bulk S:shared::cluster global done:mbarrier::complete_tx::bytes mc:multicast::cluster? hint:L2::cache_hint? ; [S w #2 async], [global r #2 async], u32, [shared a 8 async], mc>b16, hint>u64 ; 8.0@90+
cp async bulk S:shared::cta global done:mbarrier::complete_tx::bytes hint:L2::cache_hint? ; [S w #2 async], [global r #2 async], u32, [shared a 8 async], hint>u64 ; 8.6@90+
cp async bulk S:shared::cluster shared::cta done:mbarrier::complete_tx::bytes ; [S w #2 async], [shared r #2 async], u32, [S a 8 async] ; 8.0@90+
cp async bulk global S:shared::cta done:bulk_group hint:L2::cache_hint? ; [global w #2 async], [S r #2 async], u32, hint>u64 ; 8.0@90+
cp async bulk prefetch L2 global hint:L2::cache_hint? ; [global h #1 async], u32, hint>u64 ; 8.0@90+
cp async bulk commit_group ; ; 8.0@90+
cp async bulk wait_group read? ; #0..255 ; 8.0@90+
cp async bulk tensor D:@dims S:shared::cluster global M:tile? done:mbarrier::complete_tx::bytes mc:multicast::cluster? hint:L2::cache_hint? ; [S w ? async], [tensor D global r ? async], [shared a 8 async], mc>b16, hint>u64 ; 8.0@90+
cp async bulk tensor D:@dims S:shared::cta global M:tile? done:mbarrier::complete_tx::bytes hint:L2::cache_hint? ; [S w ? async], [tensor D global r ? async], [shared a 8 async], hint>u64 ; 8.6@90+
cp async bulk tensor D:3d|4d|5d S:shared::cluster global M:im2col done:mbarrier::complete_tx::bytes mc:multicast::cluster? hint:L2::cache_hint? ; [S w ? async], [tensor D global r ? async], [shared a 8 async], {{D-2:b16}}, mc>b16, hint>u64 ; 8.0@90+
cp async bulk tensor D:3d|4d|5d S:shared::cta global M:im2col done:mbarrier::complete_tx::bytes hint:L2::cache_hint? ; [S w ? async], [tensor D global r ? async], [shared a 8 async], {{D-2:b16}}, hint>u64 ; 8.6@90+
cp async bulk tensor D:@dims global S:shared::cta M:tile? done:bulk_group hint:L2::cache_hint? ; [tensor D global w ? async], [S r ? async], hint>u64 ; 8.0@90+
cp async bulk tensor D:3d|4d|5d global S:shared::cta M:im2col_no_offs done:bulk_group hint:L2::cache_hint? ; [tensor D global w ? async], [S r ? async], hint>u64 ; 8.0@90+
cp async bulk prefetch tensor D:@dims L2 global M:tile? hint:L2::cache_hint? ; [tensor D global h ? async], hint>u64 ; 8.0@90+
cp async bulk prefetch tensor D:3d|4d|5d L2 global M:im2col hint:L2::cache_hint? ; [tensor D global h ? async], {{D-2:b16}}, hint>u64 ; 8.0@90+
cp reduce async bulk global S:shared::cta done:bulk_group hint:L2::cache_hint? op:and|or|xor T:b32|b64 ; [global a #2 async], [S r #2 async], u32, hint>u64 ; 8.0@90+
cp reduce async bulk global S:shared::cta done:bulk_group hint:L2::cache_hint? op:add T:u32|s32|u64|f32|f64 ; [global a #2 async], [S r #2 async], u32, hint>u64 ; 8.0@90+
cp reduce async bulk global S:shared::cta done:bulk_group hint:L2::cache_hint? op:inc|dec T:u32 ; [global a #2 async], [S r #2 async], u32, hint>u64 ; 8.0@90+
cp reduce async bulk global S:shared::cta done:bulk_group hint:L2::cache_hint? op:min|max T:u32|s32|u64|s64|f16|bf16 ; [global a #2 async], [S r #2 async], u32, hint>u64 ; 8.0@90+
cp reduce async bulk global S:shared::cta done:bulk_group hint:L2::cache_hint? op:add noftz T:f16|bf16 ; [global a #2 async], [S r #2 async], u32, hint>u64 ; 8.0@90+
cp reduce async bulk S:shared::cluster shared::cta done:mbarrier::complete_tx::bytes op:and|or|xor T:b32 ; [S a #2 async], [shared r #2 async], u32, [S a 8 async] ; 8.0@90+
cp reduce async bulk S:shared::cluster shared::cta done:mbarrier::complete_tx::bytes op:add T:u32|s32|u64 ; [S a #2 async], [shared r #2 async], u32, [S a 8 async] ; 8.0@90+
cp reduce async bulk S:shared::cluster shared::cta done:mbarrier::complete_tx::bytes op:min|max T:u32|s32 ; [S a #2 async], [shared r #2 async], u32, [S a 8 async] ; 8.0@90+
cp reduce async bulk S:shared::cluster shared::cta done:mbarrier::complete_tx::bytes op:inc|dec T:u32 ; [S a #2 async], [shared r #2 async], u32, [S a 8 async] ; 8.0@90+
cp reduce async bulk tensor D:@dims global S:shared::cta op:add|min|max|inc|dec|and|or|xor M:tile? done:bulk_group hint:L2::cache_hint? ; [tensor D global a ? async], [S r ? async], hint>u64 ; 8.0@90+
cp reduce async bulk tensor D:3d|4d|5d global S:shared::cta op:add|min|max|inc|dec|and|or|xor M:im2col_no_offs done:bulk_group hint:L2::cache_hint? ; [tensor D global a ? async], [S r ? async], hint>u64 ; 8.0@90+
tensormap replace tile global_address S:global|shared::cta? b1024 b64 ; [S w 128], b64 ; 8.3@90a {_BLACKWELL}
tensormap replace tile rank S:global|shared::cta? b1024 b32 ; [S w 128], b32 ; 8.3@90a {_BLACKWELL}
tensormap replace tile box_dim|global_dim|element_stride S:global|shared::cta? b1024 b32 ; [S w 128], #0..4, b32 ; 8.3@90a {_BLACKWELL}
tensormap replace tile global_stride S:global|shared::cta? b1024 b64 ; [S w 128], #0..4, b64 ; 8.3@90a {_BLACKWELL}
tensormap replace tile elemtype S:global|shared::cta? b1024 b32 ; [S w 128], #0..12 ; 8.3@90a {_BLACKWELL}
tensormap replace tile interleave_layout S:global|shared::cta? b1024 b32 ; [S w 128], #0..2 ; 8.3@90a {_BLACKWELL}
tensormap replace tile swizzle_mode S:global|shared::cta? b1024 b32 ; [S w 128], #0..3 ; 8.3@90a {_BLACKWELL}
tensormap replace tile fill_mode S:global|shared::cta? b1024 b32 ; [S w 128], #0..1 ; 8.3@90a {_BLACKWELL}
tensormap cp_fenceproxy global shared::cta tensormap::generic release scope:@scope sync aligned ; [global w 128], [shared r 128], #128 ; 8.3@90+

# ---- tcgen05
tcgen05 alloc cta_group::1|cta_group::2 sync aligned S:shared::cta? b32 ; [S w 4], u32 ; 8.6@100f 8.6@103f
tcgen05 dealloc cta_group::1|cta_group::2 sync aligned b32 ; b32!, u32 ; 8.6@100f 8.6@103f
tcgen05 relinquish_alloc_permit cta_group::1|cta_group::2 sync aligned ; ; 8.6@100f 8.6@103f
tcgen05 ld sync aligned 32x32b|16x64b N:x1|x2|x4|x8|x16|x32|x64|x128 pack::16b? b32 ; ={{N:b32}}, [tmem r ?] ; 8.6@100f 8.6@103f
tcgen05 st sync aligned 32x32b|16x64b N:x1|x2|x4|x8|x16|x32|x64|x128 unpack::16b? b32 ; [tmem w ?], {{N:b32}} ; 8.6@100f 8.6@103f
tcgen05 ld sync aligned 16x128b N:x1|x2|x4|x8|x16|x32|x64 pack::16b? b32 ; ={{2*N:b32}}, [tmem r ?] ; 8.6@100f 8.6@103f
tcgen05 st sync aligned 16x128b N:x1|x2|x4|x8|x16|x32|x64 unpack::16b? b32 ; [tmem w ?], {{2*N:b32}} ; 8.6@100f 8.6@103f
tcgen05 ld sync aligned 16x256b N:x1|x2|x4|x8|x16|x32 pack::16b? b32 ; ={{4*N:b32}}, [tmem r ?] ; 8.6@100f 8.6@103f
tcgen05 st sync aligned 16x256b N:x1|x2|x4|x8|x16|x32 unpack::16b? b32 ; [tmem w ?], {{4*N:b32}} ; 8.6@100f 8.6@103f
tcgen05 wait::ld|wait::st sync aligned ; ; 8.6@100f 8.6@103f
tcgen05 fence::before_thread_sync|fence::after_thread_sync ; ; 8.6@100f 8.6@103f
tcgen05 commit cta_group::1|cta_group::2 mbarrier::arrive::one S:shared::cluster? b64 ; [S a 8 async] ; 8.6@100f 8.6@103f
tcgen05 mma cta_group::1|cta_group::2 kind::f16|kind::tf32|kind::f8f6f4 ; [tmem a ? async], desc/[tmem r ? async], desc, b32!, p ; 8.6@100f 8.6@103f
tcgen05 mma cta_group::1|cta_group::2 kind::i8 ; [tmem a ? async], desc/[tmem r ? async], desc, b32!, p ; 8.6@100a 8.6@103a
"""
