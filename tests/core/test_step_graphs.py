"""Claims about decoding by CUDA graphs, which a CPU emulates: equal captions, few graphs, few launches."""
import copy
from functools import partial

import pytest
import torch
from captured import Capture, Graph, emulate, memory
from conftest import VOCAB, images, on_gpu, tiny_captioner
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from open_clip_mdc.data.fingerprint import fingerprint
from open_clip_mdc.decoding.confidence import fully_masked
from open_clip_mdc.decoding.sampling import Sampling
from open_clip_mdc.models import step_graphs
from open_clip_mdc.models.precision import with_cast_blocks
from open_clip_mdc.models.step_graphs import StepGraphs


@pytest.fixture
def graphs(monkeypatch):
    return emulate(monkeypatch)


def pair(objective="mdc", **cfg):
    """The same captioner without graphs and with."""
    plain = tiny_captioner(objective, **cfg)
    with torch.no_grad():
        torch.nn.init.normal_(plain.text.positional_embedding, std=0.5)
        if plain.length_head is not None:
            torch.nn.init.normal_(plain.length_head.weight, std=0.1)
    captured = copy.deepcopy(plain)
    captured.step_graphs = StepGraphs()
    return plain, captured


def batches(*sizes):
    return [images(size, seed=i) for i, size in enumerate(sizes)]


ONE_LENGTH = [{"length": 6}, {"length": 6, "tokens_per_step": 3}, {"length": 5, "tokens_per_step": 0.3},
              {"text": fully_masked(torch.tensor([4]), VOCAB)}, {"length": 6, "guidance_scale": 2.0},
              {"length": 6, "temperature": 1.0, "samples": 2}]
LENGTHS = [{}, {"length": "auto"}, {"length": "sample"}, {"length": "top", "samples": 3},
           {"length": "auto", "guidance_scale": 2.0}]


def decode(model, image, temperature=0.0, **options):
    if options.get("guidance_scale"):
        options["blind"] = torch.zeros(16, model.image_width, device=image.device)
    sampling = Sampling(temperature, generator=torch.Generator(image.device).manual_seed(0))
    return model.generate(image, return_trace=True, sampling=sampling, **options)


def equally(one, other, image, **options) -> bool:
    return all(map(torch.equal, decode(one, image, **options), decode(other, image, **options)))


def captioned_alike(options, device, precision, **tolerance) -> StepGraphs:
    """The graphs of a captioner that says what another says without."""
    plain, captured = (model.to(device) for model in pair())
    for image in batches(4, 4, 4, 3):  # the last batch is smaller
        with torch.autocast(device, precision, precision == torch.bfloat16):
            expected, found = (decode(model, image.to(device), **options) for model in (plain, captured))
        assert torch.equal(found.text, expected.text) and torch.equal(found.step, expected.step)
        torch.testing.assert_close(found.log_prob, expected.log_prob, **tolerance)
    return captured.step_graphs


@pytest.mark.parametrize("options", ONE_LENGTH + LENGTHS)
def test_captions_by_graphs_are_those_without(graphs, options):
    """One length: to the last bit. Captions of several are computed in other sizes, as in another batch."""
    exactly = options in ONE_LENGTH
    captioned_alike(options, "cpu", torch.float32, rtol=0 if exactly else 1e-4, atol=0 if exactly else 1e-5)
    assert sum(graph.replays for graph in graphs) >= 6


def test_results_are_known_by_a_fingerprint_that_no_graph_changes():
    plain, captured = pair()
    captured.patch_tokens = torch.compile(captured.patch_tokens, backend="eager")
    assert fingerprint(captured) == fingerprint(plain) and "step_graphs" not in vars(plain)


@pytest.mark.parametrize("sampler", [{}, {"sampler": "ancestral", "steps": 5}])
def test_a_decoder_that_reads_the_time_is_captured_too(graphs, sampler):
    plain, captured = pair("mcd-absorbing", t_min=0.0, time_embedding=True)
    torch.nn.init.normal_(plain.text.time_embedding.weight)
    captured.load_state_dict(plain.state_dict())
    for image in batches(3, 3):
        assert equally(captured, plain, image, length=6, **sampler)
    assert len(graphs) == 1 and graphs[0].replays > 5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_graphs_follow_autocast_and_the_weights(graphs, mode):
    """Also where a caller turns inference mode on or off between two batches."""
    plain, captured = pair()
    for i, image in enumerate(batches(2, 2, 2, 2)):
        if i == 2:
            with torch.no_grad():
                for model in (plain, captured):
                    model.text.blocks[0].self_qkv.weight.mul_(2)
        for dtype in (torch.bfloat16, torch.float32):
            with (mode if i % 2 else torch.no_grad)(), torch.autocast("cpu", torch.bfloat16, dtype == torch.bfloat16):
                assert equally(captured, plain, image, length=4)
    assert len(graphs) == 8 == sum(graph.replays == 3 for graph in graphs)  # each change of the weights' place is new


def test_a_graph_reads_its_buffers_and_the_weights_and_nothing_that_may_be_gone(graphs):
    _, model = pair()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model.generate(images(4), length=6)
        body = with_cast_blocks(model.text, torch.bfloat16)
    lasting = {memory(x) for x in (*body.parameters(), *(x for x, _ in model.step_graphs.buffers.values()))}
    assert graphs[0].reads and set(graphs[0].reads) <= lasting
    assert sum(x.dtype == torch.bfloat16 for x in graphs[0].reads.values()) > 20  # the blocks that were cast


class Kernels(TorchDispatchMode):
    """Counts the operators that a GPU would run."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view and function.overloadpacket.__name__ not in (
            "detach", "lift_fresh", "empty", "new_empty", "empty_like", "_unsafe_view")
        return function(*args, **(kwargs or {}))


def test_a_step_launches_28_kernels_in_place_of_some_200(graphs):
    of_a_step = []
    for model in pair(layers=12):
        counts = []
        for length in (4, 4, 4, 8, 8, 8):  # the first two runs of a size are other ones
            with Kernels() as kernels:
                model.generate(images(2), length=length)
            counts.append(kernels.count)
        of_a_step.append((counts[5] - counts[2]) / 4)
    plain, captured = of_a_step
    assert captured <= 28 and captured + 180 <= plain <= 205


def test_lengths_that_vary_from_batch_to_batch_are_captured_a_few_times(graphs):
    """As many graphs serve 40 batches by length "auto", 8 lengths tried, as serve some of them."""
    _, model = pair()
    made, packings = [], set()
    token_logits = model.token_logits
    model.token_logits = lambda *args, **kwargs: packings.add(tuple(args[1])) or token_logits(*args, **kwargs)
    for i in range(40):
        model.generate(images(4, seed=i), length="auto")
        made.append(len(graphs))
    assert made[-1] <= min(12, made[20] + 1) and len(packings) > 40


def test_beyond_a_number_of_sizes_decoding_runs_without(graphs, monkeypatch):
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 2)
    plain, captured = pair()
    for length in (3, 4, 5, 6, 3):
        assert equally(captured, plain, images(2, seed=length), length=length)
    assert len(graphs) == len(captured.step_graphs.graphs) == 2
    assert {shape[0] for (number, shape, _) in captured.step_graphs.buffers if number == 0} == {2 * 5, 2 * 6}


def test_the_emulation_refuses_and_forgets_what_cuda_does():
    graph, x, seen = Graph(), torch.ones(3), []
    with Capture(graph, "there", "there", "thread_local"):
        y = (x * 2).view(3, 1)
        z = torch.zeros(3).add_(1) + y[:, 0]
        seen.append(0)
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            y.sum().item()
    assert z.isnan().all() and list(graph.reads) == [memory(x)]
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(z, torch.full((3,), 2 * value + 1)) and seen == [0]


def test_a_copy_of_a_captioner_makes_its_own_graphs(graphs):
    plain, captured = pair()
    captured.generate(images(2), length=4)
    other = copy.deepcopy(captured)
    assert captured.step_graphs.graphs and not other.step_graphs.graphs
    assert torch.equal(other.generate(images(2), length=4), plain.generate(images(2), length=4)) and len(graphs) == 2


@pytest.mark.parametrize("objective, backend", [("mdc", "aot_eager"), ("arc", "eager")])
def test_the_compiled_encoder_gives_the_same_captions_by_two_compilations(objective, backend, graphs, monkeypatch):
    """One for any number of images, and one for a single image."""
    plain, model, compile = tiny_captioner(objective), tiny_captioner(objective), torch.compile
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(compile, backend=backend, fullgraph=True))
    step_graphs.compile_for_captions(model)
    for image in batches(4, 4, 3, 1, 2):
        found, expected = (x.generate(image, length=5, return_trace=True) for x in (model, plain))
        assert torch.equal(found.text, expected.text)
        torch.testing.assert_close(found.log_prob, expected.log_prob)
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]
    assert bool(graphs) == (objective == "mdc")


@on_gpu
@pytest.mark.parametrize("options", ONE_LENGTH + LENGTHS)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_captions_by_graphs_of_a_card_are_those_without(options, precision):
    assert any(captioned_alike(options, "cuda", precision, rtol=1e-2, atol=1e-2).graphs.values())
