"""The block formats of GGUF as the templates of gguf/ take them: sixteen elements a step, four a lane."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import gcd

import numpy as np

from ..ops.gguf import E2M1_DOUBLED, FORMATS, IQ4_VALUES, grid
from ..tensor import TensorDesc


@dataclass(frozen=True, slots=True)
class FormatConsts:
    """bias: what codes, bytes from 0 on, are above their numbers. parts: of a block, whose words are loaded together. scale_at,
    scale_factor: where the f16 scale lies, and what it is multiplied with. has_factor: steps have factors, two f16, which, if `folds`, make
    f16 numbers of codes exactly. group: steps that share factor and minimum. lifts: products take codes as they are, and what their bias
    adds is taken off as minima are. values: of the codes of four bits; is_paired: products look the two of a byte up together, in shared
    memory."""

    name: str
    bias: int
    parts: int = 1
    scale_at: int = 0
    scale_factor: float = 1.0
    has_factor: bool = False
    folds: bool = False
    has_min: bool = False
    group: int = 2
    lifts: bool = False
    grid: str = ""
    values: tuple[int, ...] = ()
    is_paired: bool = False

    @property
    def size(self) -> int:
        return FORMATS[self.name][0]

    @property
    def num_bytes(self) -> int:
        return FORMATS[self.name][1]

    @property
    def steps(self) -> int:
        return self.size // 16

    @property
    def steps_per_part(self) -> int:
        return self.steps // self.parts

    @property
    def has_eights(self) -> bool:
        """In products a lane has eight neighbouring elements of every 32, four of a step and four of the next: an entry of the codebook."""
        return bool(self.grid)

    @property
    def flips(self) -> bool:
        """Codes have signs of their own."""
        return self.has_eights and self.bias == 64

    @property
    def is_plain(self) -> bool:
        """Codes are taken as they are: as subnormal f16."""
        return self.bias == 0 or self.lifts or self.flips

    @property
    def has_sums(self) -> bool:
        """Sums of x over groups are needed."""
        return self.has_min or self.lifts

    @property
    def chain(self) -> int:
        """Steps whose products have one scale once factors are folded."""
        return self.group if self.has_factor and not self.folds else self.steps

    @property
    def is_signed(self) -> bool:
        """Codes are e2m1 numbers, which are f16 but for a power of two."""
        return self.values == E2M1_DOUBLED

    @property
    def entry_words(self) -> int:
        """Words of f16 that products look up for a byte: its two codes, or an entry of a codebook of 256; 0 of other formats."""
        return 1 if self.is_paired else grid(self.grid).shape[1] // 2 if self.grid and len(grid(self.grid)) == 256 else 0

    @property
    def entries(self) -> list[str]:
        """These words: of its low and of its high half; of each four numbers of a codebook, as subnormals, 0 and 2, then 1 and 3."""
        if self.is_paired:
            halves = np.array(self.values).astype("<f2").view("<u2").tolist()
            return [f"0x{high << 16 | low:08X}" for high in halves for low in halves]
        fours = grid(self.grid).astype(np.uint32).reshape(-1, 4)
        return [f"0x{word:08X}" for word in (fours[:, :2] | fours[:, 2:] << 16).ravel()]

    @property
    def entry_pitch(self) -> int:
        """Bytes from an entry to the next: as many lanes as are served at once have copies in banks of their own."""
        return 128

    @property
    def table_bytes(self) -> int:
        """What products look up in shared memory."""
        return 256 * self.entry_pitch if self.entry_words else self.grid_bytes

    @property
    def order(self) -> tuple[int, ...]:
        """Elements of a lane in the order of the f16 that stand for them; of pairs two lanes put theirs together."""
        return (0, 1, 2, 3) if self.is_paired else (0, 2, 1, 3)

    @property
    def is_split(self) -> bool:
        """Codes are taken out of a word where they are."""
        return self.name in ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q2_K", "Q3_K", "TQ2_0")

    def shift(self, step: int) -> int:
        """Codes of the step are taken out 2^shift-fold."""
        if not self.is_split:
            return 0
        return 4 * step if self.size == 32 else step // 2 % 2 * 4 if self.name in ("Q4_K", "Q5_K") else step % 8 // 2 * 2

    @property
    def shifts(self) -> list[int]:
        """Of all steps."""
        return sorted({self.shift(step) for step in range(self.steps)})

    def is_signed_high(self, step: int) -> bool:
        """The step's e2m1 codes lie in the upper halves of bytes."""
        return self.name == "MXFP4" and step == 1

    @property
    def has_trits(self) -> bool:
        """Bytes hold five trits, of which products take the next as bits 8 and 9 of three times what is left: a subnormal, 256-fold."""
        return self.name == "TQ1_0"

    @property
    def unit(self) -> float:
        """What sums of products are multiplied with."""
        if self.has_trits:
            return 2.0**16
        return 2.0**24 if self.is_plain else 1.0 if not self.is_signed else 2.0**15 if self.has_factor else 2.0**14

    def less(self, shift: int) -> float:
        """What is added to a code as it is taken out, 2^shift-fold, and made single again."""
        return -self.bias / self.unit if self.has_trits else -1024 * 2.0**-shift - self.bias

    @property
    def table(self) -> list[str]:
        """Four words: the 16 codes of a nibble."""
        codes = bytes(v + self.bias for v in self.values)
        return [f"0x{word:08X}" for word in struct.unpack("<4I", codes)]

    @property
    def grid_words(self) -> int:
        """Words of an entry of the codebook."""
        return grid(self.grid).shape[1] // 4 if self.grid else 0

    @property
    def grid_table(self) -> list[int]:
        """All words of the codebook."""
        return np.ascontiguousarray(grid(self.grid)).view("<u4").ravel().tolist() if self.grid else []

    @property
    def eights_table(self) -> list[int]:
        """The same as products take it: codes but for what their block adds."""
        return self.grid_table if self.flips else [8 * word for word in self.grid_table]

    @property
    def grid_bytes(self) -> int:
        return grid(self.grid).size if self.grid else 0

    @property
    def run(self) -> int:
        """Blocks of 256 elements."""
        return 256 // self.size


def phase_of(f: FormatConsts, blocks: TensorDesc, run_bytes: int) -> int:
    """4, 2 or 1: what the addresses of runs of blocks are multiples of; 2 only if all fields' are then, too."""
    steps = [s for s, n in zip(blocks.strides[:-1], blocks.shape[:-1], strict=True) if n > 1]
    phase = gcd(4, blocks.align, run_bytes, *steps)
    return 1 if phase == 2 and f.num_bytes % 2 else phase


_FORMATS = (
    FormatConsts("Q4_0", 8), FormatConsts("Q4_1", 0, has_min=True), FormatConsts("Q5_0", 16), FormatConsts("Q5_1", 0, has_min=True),
    FormatConsts("Q8_0", 128),
    FormatConsts("Q2_K", 0, parts=2, scale_at=80, has_factor=True, has_min=True, group=1),
    FormatConsts("Q3_K", 4, parts=2, scale_at=108, has_factor=True, group=1, lifts=True),
    FormatConsts("Q4_K", 0, parts=4, has_factor=True, has_min=True),
    FormatConsts("Q5_K", 0, parts=4, has_factor=True, has_min=True),
    FormatConsts("Q6_K", 32, parts=2, scale_at=208, has_factor=True, group=1, lifts=True),
    FormatConsts("Q8_K", 128, parts=8),
    FormatConsts("IQ1_S", 9, parts=8, scale_factor=0.125, has_factor=True, grid="iq1_s"),
    FormatConsts("IQ1_M", 9, parts=8, has_factor=True, folds=True, group=1, grid="iq1_s"),
    FormatConsts("IQ2_XXS", 64, parts=8, scale_factor=0.125, has_factor=True, grid="iq2_xxs"),
    FormatConsts("IQ2_XS", 64, parts=8, scale_factor=0.125, has_factor=True, folds=True, group=1, grid="iq2_xs"),
    FormatConsts("IQ2_S", 64, parts=8, scale_factor=0.125, has_factor=True, folds=True, group=1, grid="iq2_s"),
    FormatConsts("IQ3_XXS", 64, parts=8, scale_factor=0.25, has_factor=True, grid="iq3_xxs"),
    FormatConsts("IQ3_S", 64, parts=8, has_factor=True, grid="iq3_s"),
    FormatConsts("IQ4_NL", 128, values=IQ4_VALUES, is_paired=True),
    FormatConsts("IQ4_XS", 128, parts=8, has_factor=True, values=IQ4_VALUES, is_paired=True),
    FormatConsts("TQ1_0", 1, scale_at=52), FormatConsts("TQ2_0", 1, parts=2, scale_at=64),
    FormatConsts("MXFP4", 16, values=E2M1_DOUBLED),
    FormatConsts("NVFP4", 16, parts=4, has_factor=True, group=1, values=E2M1_DOUBLED),
)
FORMAT_CONSTS = {f.name: f for f in _FORMATS}


def half_pair(value: float) -> str:
    """Two times the f16 `value`, which f16 must hold, as a word."""
    bits = struct.unpack("<H", struct.pack("<e", value))[0]
    return f"0x{bits * 0x10001:08X}"
