"""Claims about the world of mentions: shapes go with colours as often as asked, order is random, captions are true."""
import hashlib
import json
from dataclasses import asdict

from conftest import run_tool
from open_clip.tokenizer import SimpleTokenizer
from scene_truth import read_caption, read_scene

from open_clip_mdc.data.shards import read_metadata, read_samples
from open_clip_mdc.scenes import mentions
from open_clip_mdc.scenes.mentions import World


def drawn(world, count):
    return [mentions.draw_scene(world, world.rng("train", index)) for index in range(count)]


def test_the_world_stays_what_it_was():
    """Published numbers are about these scenes, in which a coin decides what is said first."""
    scenes = [*drawn(World(), 60), *drawn(World(redundancy=0.0), 20)]
    assert hashlib.sha256(repr(scenes).encode()).hexdigest()[:16] == "f443c12f9968a479"


def test_both_captions_of_a_scene_are_true_and_of_the_same_words_and_tokens():
    tokenizer = SimpleTokenizer()
    for scene in drawn(World(), 100):
        texts = mentions.captions(scene, None)
        colour_first, shape_first = texts["captions"]
        relation, names = read_scene([vars(item) for item in scene.objects])
        assert colour_first == f" {relation} ".join(f"a {name}" for name in names)
        assert read_caption(colour_first) == (relation, names)
        assert shape_first == f" {relation} ".join("a " + " ".join(reversed(name.split())) for name in names)
        assert texts["caption"] == texts["captions"][mentions.ORDERS.index(scene.order)]
        assert texts["long_caption"].startswith(f"{texts['caption']}. the ")
        assert all(len(tokenizer.encode(text)) == len(text.split()) for text in texts["captions"])


def test_the_command_writes_it_with_both_orders_of_each_image_and_probes_of_one_attribute(tmp_path, capsys):
    out = tmp_path / "world"
    run_tool(["scenes", "--out", out,
              "--world mentions --redundancy 0.5 --num-train 8 --num-val 4 --num-probe 40 --num-pairs 1"])
    world = World(redundancy=0.5)
    samples = list(read_samples(str(out / "val/00000.tar")))
    assert len(samples) == 4
    for index, sample in enumerate(samples):
        scene = mentions.draw_scene(world, world.rng("val", index))
        texts = mentions.captions(scene, None)
        assert read_metadata(sample) == json.loads(json.dumps({**asdict(scene), **texts}))
        assert sample["txt"].decode() == texts["caption"]
    assert {path.name for path in out.iterdir()} == {"train", "train-long", "val", "val-long", "probe-colour",
                                                     "probe-shape", "sugarcrepe"}
    labels = {name: [int(s["cls"]) for s in read_samples(str(out / f"probe-{name}/train/0.tar"))]
              for name in ("colour", "shape")}
    assert {*labels["colour"]} == {*labels["shape"]} == {0, 1, 2, 3}
