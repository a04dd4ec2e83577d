"""The emulator against what an H100 recorded: the same bits, or within the worst error measured where instructions approximate."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.errors import EmulatorFault
from oxidnn.runtime.emu_backend import EmulatedBackend
from tests.emu.recorded import APPROXIMATIONS, CASES, FAULTING, FILE, all_maps, error, kept

RECORDED = dict(np.load(FILE)) if FILE.exists() else {}
ALL = {name: run for group in CASES.values() for name, run in group.items()}


def test_the_recording_is_complete() -> None:
    assert {name.split(": ")[0] for name in RECORDED} == set(ALL) - FAULTING


@pytest.mark.parametrize("name", [n for n in ALL if n not in APPROXIMATIONS and n in RECORDED and not n.startswith("exited")])
def test_the_same_bits(name: str) -> None:
    got = kept(name, ALL[name](EmulatedBackend("sm_90a", "all", tensor_core="exact")))
    for part, value in got.items():
        np.testing.assert_array_equal(value, RECORDED[part], err_msg=part)


@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_within_the_worst_error_of_silicon(name: str) -> None:
    """The emulator is no worse than silicon, and so never further from it than both errors together."""
    worst = float(RECORDED[f"{name}: worst"])
    got = ALL[name](EmulatedBackend("sm_90a", "all"))
    mine = error(name, got)
    assert mine <= worst
    _, _, relative = APPROXIMATIONS[name]
    here, there = (x.view(np.float32).astype(np.float64) for x in (got[::64], RECORDED[name]))
    assert (np.abs(here - there) <= (worst + mine) * (np.abs(there) * (1 + worst) if relative else 1)).all()


@pytest.mark.parametrize("name", CASES["exited"])
def test_threads_that_left_count_at_a_barrier_of_silicon(name: str) -> None:
    """PTX does not promise it: the barrier checker refuses what the hardware lets pass."""
    got = ALL[name](EmulatedBackend("sm_90a", ("bounds", "align")))
    np.testing.assert_array_equal(got, RECORDED[name])
    with pytest.raises(EmulatorFault, match=r"\[barrier\] deadlock"):
        ALL[name](EmulatedBackend("sm_90a", "all"))


@pytest.mark.parametrize("name", sorted(FAULTING))
def test_what_faulted_on_silicon_faults_here(name: str) -> None:
    with pytest.raises(EmulatorFault, match=r"\[align\] the box begins"):
        ALL[name](EmulatedBackend("sm_90a", "all"))


def test_maps_of_every_kind_were_encoded() -> None:
    taken = RECORDED["tensor maps"].reshape(-1, 128).any(1)
    assert taken.all(), [spec for spec, is_taken in zip(all_maps(), taken, strict=True) if not is_taken]
