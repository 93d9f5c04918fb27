"""Uniform numbers of sampled tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marl_ray.policies.language.philox import philox, token_uniforms

WORDS = st.integers(0, 2**64 - 1)


# Published with the generator: Random123's known answers for philox4x32, 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_it_is_philox(counter, key, expected):
    words = philox([np.array([word], np.uint64) for word in counter], (np.uint64(key[0]), np.uint64(key[1])))
    assert tuple(int(word[0]) for word in words) == expected


@given(WORDS, st.lists(WORDS, min_size=1, max_size=5), st.integers(1, 9))
def test_a_number_depends_on_seed_stream_and_token_alone(seed, streams, tokens):
    together = token_uniforms(seed, streams, tokens)
    assert together.shape == (len(streams), tokens)
    assert (together >= 0).all() and (together < 1).all()
    for stream, row in zip(streams, together, strict=True):
        assert (token_uniforms(seed, [stream], 11)[0, :tokens] == row).all()


def test_random_numbers_are_uniform_and_independent():
    numbers = token_uniforms(3, range(250), 200)
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-3
    # A token's place in the stream, and a stream, is uniform by itself.
    assert min(stats.kstest(part, "uniform").pvalue for part in (*numbers.T[:30], *numbers[:30])) > 1e-5
    centered = numbers - 0.5
    bound = 4.5 / 12 / numbers.size**0.5  # 4.5 standard deviations of a mean of products
    for other in (
        np.roll(centered, 1, 1),  # the token before
        np.roll(centered, 2, 1),  # the block before
        np.roll(centered, 1, 0),  # the stream before
        token_uniforms(4, range(250), 200) - 0.5,  # the next seed
        token_uniforms(3, range(2**32, 2**32 + 250), 200) - 0.5,  # the upper half of a stream's number
    ):
        assert abs((centered * other).mean()) < bound
    pairs = np.histogram2d(numbers[:, 0::2].ravel(), numbers[:, 1::2].ravel(), 16)[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3


def test_negative_seeds_and_streams_count_modulo_two_to_the_64():
    assert (token_uniforms(-1, [-2], 5) == token_uniforms(2**64 - 1, [2**64 - 2], 5)).all()
