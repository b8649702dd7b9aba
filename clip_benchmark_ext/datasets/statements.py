"""Read NLVR (Suhr et al. 2017), true and false statements about one image, in its official files."""
from pathlib import Path

from open_clip_mdc.data.paths import inside

from .local_files import Source, find, image_folder, need_images, read_json_lines, texts
from .readers import Case, Read

PERMUTATIONS = 6  # images per statement, with the three boxes in each order


def nlvr(name: str, root: Path, **_) -> Read:
    """Read the folder nlvr/dev or nlvr/test of github.com/lil-lab/nlvr, labelled sentences with six images each."""
    split = name.partition("/")[2]
    source = Source(f"{split}.json", ("", split, f"nlvr/{split}", f"nlvr/nlvr/{split}"), ("images",),
                    "https://github.com/lil-lab/nlvr by git clone", f"ROOT/{split}.json, ROOT/images/*/{split}-*.png")
    path = find(source, name, root)
    folder = image_folder(source, name, path)
    cases = []
    for index, row in read_json_lines(path):
        sentence, identifier, label = texts(row, ("sentence", "identifier", "label"), path, index)
        if label.lower() not in ("true", "false"):
            raise ValueError(f"{path}, row {index}: label is {label!r}, not true or false")
        for k in range(PERMUTATIONS):
            image = inside(folder, f"{row.get('directory')}/{split}-{identifier}-{k}.png", path, index)
            cases.append(Case(f"{identifier}-{k}", (image,), (sentence,), sentence, right=int(label.lower() == "true")))
    need_images(source, name, folder, cases)
    return cases, {"cases_left_out": 0}
