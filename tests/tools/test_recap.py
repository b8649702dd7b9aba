"""Claims about `open_clip_mdc prepare recap`: subsets of Recap-DataComp."""
import json
from pathlib import Path

import pytest
from conftest import members, times, write_tar
from open_clip_train.data import get_dataset_size
from shard_files import make_image, samples, tool


@pytest.fixture
def recap(tmp_path) -> Path:
    """Write six shards of four samples as img2dataset does. One sample has no re_caption, one no image."""
    for shard in range(6):
        content = {}
        for i in range(4):
            key = f"{shard:05d}{i:04d}"
            meta = {"key": key, "caption": "alt text", "re_caption": f"A long text\nabout {key}."}
            if (shard, i) == (2, 1):
                meta["re_caption"] = None
            content |= {f"{key}.jpg": make_image(i), f"{key}.txt": b"alt text",
                        f"{key}.json": json.dumps(meta).encode()}
        if shard == 4:
            del content["000040003.jpg"]
        write_tar(tmp_path / f"recap/{shard:05d}.tar", content)
    return tmp_path


def draw(recap: Path, pairs: int, out: str = "out", *flags) -> Path:
    tool("recap", "--shards", recap / "recap/{00000..00005}.tar", "--pairs", pairs, "--out", recap / out, *flags)
    return recap / out


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.tar"))}


def test_recaptioned_text_stands_in_for_the_alt_text_and_what_has_none_is_counted(recap, capsys):
    out = draw(recap, 22)
    printed = capsys.readouterr().out
    assert "1 sample left out: no re_caption" in printed and "1 sample left out: no image" in printed
    assert f"22 pairs: --train-data '{out}/{{00000..00005}}.tar'" in printed
    assert get_dataset_size(printed.split("'")[1]) == (22, 6)
    source = samples(*(recap / "recap").iterdir())
    for sample in samples(*out.glob("*.tar")).values():
        key = json.loads(sample["json"])["key"]
        assert sample == source[key] | {"txt": f"A long text about {key}.".encode()}


def test_shards_as_the_data_sets_own_readme_makes_them_have_the_text_in_key_txt(tmp_path, capsys):
    """img2dataset --caption_col re_caption: KEY.txt is the re_caption, which KEY.json calls caption."""
    content = {}
    for i in range(4):
        meta = {"key": f"k{i}", "caption": f"A long text\nabout {i}.", "org_caption": "alt text"}
        content |= {f"k{i}.jpg": make_image(i), f"k{i}.txt": b"" if i == 3 else meta["caption"].encode(),
                    f"k{i}.json": json.dumps(meta).encode()}
    write_tar(tmp_path / "recap/0.tar", content)
    tool("recap", "--shards", tmp_path / "recap/0.tar", "--pairs 3 --out", tmp_path / "out")
    printed = capsys.readouterr().out
    assert "1 of 1 shards have no re_caption in any KEY.json" in printed
    assert "1 sample left out: no re_caption" in printed
    assert [sample["txt"] for sample in samples(tmp_path / "out/00000.tar").values()] == [
        b"A long text about %d." % i for i in range(3)]


def test_smaller_subsets_are_the_first_shards_of_larger_ones_and_the_seed_orders_them(recap):
    small, large = contents(draw(recap, 5, "small")), contents(draw(recap, 14, "large"))
    assert list(large) == ["00000.tar", "00001.tar", "00002.tar", "00003.tar"]
    assert small == {name: large[name] for name in ("00000.tar", "00001.tar")}
    assert len({tuple(contents(draw(recap, 5, f"seed{seed}", "--seed", seed)).values()) for seed in range(4)}) > 1
    grown = recap / "small"
    before = times(grown.glob("*.tar"))
    assert contents(draw(recap, 14, "small")) == large  # grows in place
    assert times(before) == before


def test_fewer_pairs_afterwards_leave_the_larger_subset_usable(recap):
    out = draw(recap, 14)
    draw(recap, 5)
    assert get_dataset_size(str(out / "{00000..00003}.tar")) == (sum(
        len(members(shard)) // 3 for shard in out.glob("*.tar")), 4)


def test_a_run_goes_on_where_it_was_interrupted_and_several_jobs_write_the_same(recap):
    whole = contents(draw(recap, 22, "whole"))
    assert contents(draw(recap, 22, "jobs", "--jobs 3")) == whole
    (recap / "whole/00003.tar").unlink()
    kept = times((recap / "whole").glob("*.tar"))
    assert contents(draw(recap, 22, "whole")) == whole
    assert times(kept) == kept
