"""Random numbers: the CPU run's for equal seeds; generators belong to one device."""

from __future__ import annotations

import copy

import pytest
import torch
from both_devices import assert_equal_runs

from auto_research.runtime.seeds import restore_rng, rng_state, torch_generator


def test_default_generator_gives_the_cpu_runs_numbers():
    def program(device):
        yield torch.randn(5, device=device)
        yield torch.rand(5, device=device)
        yield torch.randint(0, 9, (5,), device=device)
        yield torch.randperm(9, device=device)
        yield torch.empty(5, device=device).normal_(1.0, 2.0)
        yield torch.bernoulli(torch.full((9,), 0.5, device=device))
        yield torch.multinomial(torch.arange(1.0, 6.0, device=device), 3)
        yield torch.randn_like(torch.zeros(4, device=device))
        yield torch.nn.functional.gumbel_softmax(torch.zeros(2, 4, device=device), hard=True)
        yield torch.distributions.Categorical(logits=torch.zeros(7, device=device)).sample((5,))

    assert_equal_runs(program, seed=7)


def test_own_generator_gives_the_cpu_runs_numbers():
    def program(device):
        generator = torch_generator(device, "a", 1)
        yield torch.randn(5, device=device, generator=generator)
        yield torch.multinomial(torch.ones(9, device=device), 4, generator=generator)
        yield torch.randperm(6, device=device, generator=generator)
        yield torch.empty(4, device=device).uniform_(generator=generator)

    assert_equal_runs(program)


DRAWS = {
    "randn": lambda device, g: torch.randn(3, device=device, generator=g),
    "rand": lambda device, g: torch.rand(3, device=device, generator=g),
    "randint": lambda device, g: torch.randint(0, 4, (3,), device=device, generator=g),
    "randperm": lambda device, g: torch.randperm(3, device=device, generator=g),
    "normal_": lambda device, g: torch.empty(3, device=device).normal_(generator=g),
    "uniform_": lambda device, g: torch.empty(3, device=device).uniform_(generator=g),
    "bernoulli": lambda device, g: torch.bernoulli(torch.full((3,), 0.5, device=device), generator=g),
    "bernoulli_": lambda device, g: torch.empty(3, device=device).bernoulli_(0.5, generator=g),
    "exponential_": lambda device, g: torch.empty(3, device=device).exponential_(generator=g),
    "multinomial": lambda device, g: torch.multinomial(torch.ones(3, device=device), 2, generator=g),
    "normal": lambda device, g: torch.normal(torch.zeros(3, device=device), 1.0, generator=g),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_of_the_other_device_raises(name):
    draw, here, there = DRAWS[name], torch.Generator(device="shadow"), torch.Generator()
    with pytest.raises(RuntimeError, match="Expected a 'shadow' device type for generator but found 'cpu'"):
        draw("shadow", there)
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'shadow"):
        draw("cpu", here)
    torch.testing.assert_close(draw("shadow", here.manual_seed(3)).cpu(), draw("cpu", there.manual_seed(3)))


def test_generator_state_goes_round():
    generator = torch.Generator(device="shadow").manual_seed(5)
    assert generator.device == torch.device("shadow", 0)
    assert generator.initial_seed() == 5
    state = generator.get_state()
    first = torch.randn(4, device="shadow", generator=generator)
    twin = copy.deepcopy(generator)
    generator.set_state(state)
    assert torch.equal(torch.randn(4, device="shadow", generator=generator), first)
    assert torch.equal(
        torch.randn(4, device="shadow", generator=twin), torch.randn(4, device="shadow", generator=generator)
    )


def test_builtin_generators_are_untouched():
    generator = torch.Generator("cpu").manual_seed(1)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert generator.device.type == "cpu"
    loader = torch.utils.data.DataLoader(range(6), shuffle=True, generator=generator)
    assert sorted(int(x) for x in loader) == list(range(6))


def test_random_state_is_saved_and_restored_with_the_device():
    torch.manual_seed(3)
    torch.randn(2, device="shadow")
    state, module_state = rng_state(), torch.shadow.get_rng_state()
    first = torch.randn(3, device="shadow")
    restore_rng(state)
    assert torch.equal(torch.randn(3, device="shadow"), first)
    torch.shadow.set_rng_state(module_state)
    assert torch.equal(torch.randn(3, device="shadow"), first)
    with torch.random.fork_rng(devices=["shadow:0"], device_type="shadow"):
        torch.randn(9, device="shadow")
    restore_rng(state)
    assert torch.equal(torch.randn(3, device="shadow"), first)
