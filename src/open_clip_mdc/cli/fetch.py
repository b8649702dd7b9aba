"""Download data sets to train and test on, and print the commands for what cannot be downloaded directly.

    open_clip_mdc fetch coco --out data/coco
    open_clip_mdc fetch recap --out data/recap --print       # only print what there is and what to run

An interrupted download resumes when the same command is run again, as long as the server's file is the same. A file
gets its name once it is complete and has the published checksum, if there is one (COCO's by LAVIS, Flickr8k's by
mlverse), or else is of the kind that its suffix says, and no page about an error. A file that is there is checked, too.
"""
import argparse
import hashlib
import json
import os
import tarfile
import time
import zipfile
import zlib
from glob import escape
from pathlib import Path
from typing import NamedTuple

import requests

from ..data.files import hash_file, open_own
from ..data.paths import for_shell
from ..progress import progress_bar

TRIES = 5  # in a row without a new byte
TIMEOUT = 60  # seconds


class File(NamedTuple):
    url: str
    size: str = ""  # rounded
    checksum: str | None = None  # ALGORITHM:HEX

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class Source(NamedTuple):
    licence: str
    files: tuple[File, ...] = ()
    commands: tuple[str, ...] = ()  # to run by hand after the download, where OUT is the folder


COCO, SUGAR_CREPE = "http://images.cocodataset.org/zips", "https://raw.githubusercontent.com/RAIVNLab/sugar-crepe"
VAL2017 = File(f"{COCO}/val2017.zip", "816 MB", "md5:442b8da7639aecaf257c1dceb8ba8c80")
KARPATHY = File("https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip")
FLICKR8K = "https://github.com/jbrownlee/Datasets/releases/download/Flickr8k"
IMG2DATASET = ("img2dataset --url_list %s --input_format %s --url_col url --caption_col %s --output_format webdataset "
               "--output_folder OUT/shards --image_size 256 --resize_mode keep_ratio --resize_only_if_bigger True "
               "--processes_count 16 --thread_count 64")
SOURCES = {
    "coco": Source(
        "captions CC BY 4.0, photographs under Flickr's terms",
        (File(f"{COCO}/train2014.zip", "13 GB", "md5:0da8c0bd3d6becc4dcb32757491aca88"),
         File(f"{COCO}/val2014.zip", "6 GB", "md5:a3d79f5ed8d289b7a7554ce06a5782b3"), KARPATHY),
        ('for f in OUT/*.zip; do unzip -q -d OUT "$f"; done',
         "open_clip_mdc prepare coco --images OUT --annotations OUT/dataset_coco.json --out OUT/shards")),
    "flickr8k": Source(
        "non-commercial research and education, photographs under Flickr's terms",
        (File(f"{FLICKR8K}/Flickr8k_Dataset.zip", "1 GB", "md5:f18a1e2920de5bd84dae7cf08ec78978"), KARPATHY),
        ('for f in OUT/*.zip; do unzip -q -d OUT "$f"; done',
         "open_clip_mdc prepare flickr8k --images OUT/Flicker8k_Dataset --annotations OUT/dataset_flickr8k.json "
         "--out OUT/shards")),
    "flickr30k": Source(
        "non-commercial research and education, on request, photographs under Flickr's terms",
        (KARPATHY,),
        ("# request flickr30k-images.tar.gz at https://forms.illinois.edu/sec/229675, then",
         "tar -xf flickr30k-images.tar.gz -C OUT && unzip -q -d OUT OUT/caption_datasets.zip",
         "open_clip_mdc prepare flickr30k --images OUT/flickr30k-images --annotations OUT/dataset_flickr30k.json "
         "--out OUT/shards")),
    "cc3m": Source(
        "any use, with acknowledgement of Google LLC as the source of the data",
        commands=("# get Train_GCC-training.tsv at https://ai.google.com/research/ConceptualCaptions/download, then",
                  "sed -i '1s/^/caption\\turl\\n/' Train_GCC-training.tsv",
                  IMG2DATASET % ("Train_GCC-training.tsv", "tsv", "caption"))),
    "cc12m": Source(
        "any use, with acknowledgement of Google LLC as the source of the data",
        (File("https://storage.googleapis.com/conceptual_12m/cc12m.tsv", "2.6 GB"),),
        ("(printf 'url\\tcaption\\n'; cat OUT/cc12m.tsv) > OUT/cc12m-named.tsv",
         IMG2DATASET % ("OUT/cc12m-named.tsv", "tsv", "caption"))),
    "recap": Source(
        "CC BY 4.0",
        commands=("hf download UCSC-VLAA/Recap-DataComp-1B --repo-type dataset --include 'data/train_data/*' "
                  "--local-dir OUT",
                  IMG2DATASET % ("OUT/data/train_data", "parquet", "re_caption"),
                  "python -m experiments.prepare_recap --shards OUT/shards/'{00000..99999}.tar' --pairs 10000000 "
                  "--out OUT/recap-10M")),
    "sugar_crepe": Source(
        "MIT, with captions and photographs of COCO",
        (*(File(f"{SUGAR_CREPE}/0047054b243992f0fad63d6f64f7544862daf846/data/{name}.json", "", f"sha256:{checksum}")
           for name, checksum in (
            ("add_att", "012d88d729693d193760e6f3393b06a1cf874380a9db0062e937201199fe044d"),
            ("add_obj", "1b9d76b93139a937b8dc1ada92a4f05ecc821bb3c291d752428bafadd4bb0682"),
            ("replace_att", "9fe55fd4c0a9ad1f85d486d9f6d0215b41f867eb025026e7f7b5ce44352545ee"),
            ("replace_obj", "9d299600639947e9d15281a9ded1382b376cf4ea088a8d08a1314bfe76e81898"),
            ("replace_rel", "356bcc2fc4c6aed3f4d9fd50acc58489bb1fe70c28791f9368d4cbf9ea39cdc9"),
            ("swap_att", "7a7ce04e5c4c80412b48c6f0c1347fb1a2f5d54c0be6aa429b64d390e442f8d0"),
            ("swap_obj", "073cdb8e253d053614e80710834d9773b09dbc1dd0a412f6f9492262caa1dcad"))),
         VAL2017),
        ("unzip -q -d OUT OUT/val2017.zip",)),
    "aro": Source(
        "MIT, with captions and photographs of Visual Genome, COCO and Flickr30k",
        tuple(File(f"https://storage.googleapis.com/sfr-vision-language-research/datasets/{name}.json")
              for name in ("coco_karpathy_test", "flickr30k_test")),
        ("gdown 1kX2iCHEv0CADL8dSO1nMdW-V0NqIAiP3 -O OUT/visual_genome_relation.json",
         "gdown 13tWvOrNOLHxl3Rm9cR3geAdHx2qR3-Tw -O OUT/visual_genome_attribution.json",
         "gdown 1qaPlrwhGNMrR3a11iopZUT_GPP_LrgP9 -O OUT/vgr_vga_images.zip && unzip -q -d OUT "
         "OUT/vgr_vga_images.zip",
         "# the Order tests need the images of COCO's val2014 and Flickr30k: fetch coco, fetch flickr30k")),
    "sugar_crepe_pp": Source(
        "MIT, with captions and photographs of COCO",
        (*(File(f"https://raw.githubusercontent.com/Sri-Harsha/scpp/main/data/{name}.json")
           for name in ("swap_obj", "swap_att", "replace_obj", "replace_att", "replace_rel")), VAL2017),
        ("unzip -q -d OUT OUT/val2017.zip", "# gives OUT/swap_obj.json, ..., OUT/val2017/*.jpg for --dataset "
         "sugar_crepe_pp/swap_obj")),
    "bivlc": Source(
        "MIT, with captions and photographs of COCO and images generated by SDXL",
        commands=("hf download imirandam/BiVLC --repo-type dataset --include 'data/*' --local-dir OUT",
                  "# gives OUT/data/test-*.parquet for --dataset bivlc")),
    "whatsup": Source(
        "MIT, with photographs of the authors, COCO and Visual Genome",
        commands=(*(f"gdown {number} -O OUT/{name}" for name, number in (
            ("controlled_images_dataset.json", "1ap8mmmpQjLIjPGuplkpBgc1hoEHCj4hm"),
            ("controlled_clevr_dataset.json", "1unNNosLbdy9NDjgj4l8fsQP3WiAAGA6z"),
            ("coco_qa_one_obj.json", "1RsMdpE9mmwnK4zzMPpC1-wTU_hNis-dq"),
            ("coco_qa_two_obj.json", "1TCEoM0mgFmz8T4cF7PQ3XJmO6JjtiQ-s"),
            ("vg_qa_one_obj.json", "1ARMRzRdohs9QTr1gpIfzyUzvW20wYp_p"),
            ("vg_qa_two_obj.json", "1sjVG5O3QMY8s118k7kQM8zzDZH12i_95"))),
            *(f"gdown {number} -O OUT/{name}.tar.gz && tar -xf OUT/{name}.tar.gz -C OUT" for name, number in (
                ("controlled_images", "19KGYVQjrV3syb00GgcavB2nZTW5NXX0H"),
                ("controlled_clevr", "13jdBpg8t3NqW3jrL6FK8HO93vwsUjDxG"),
                ("vg_images", "1idW7Buoz7fQm4-670n-oERw9U-2JLJvE"))),
            "# put COCO's val2017 in OUT/val2017, for --dataset whatsup/controlled_images_a")),
    "cola": Source(
        "MIT, with photographs of Visual Genome",
        (File("https://raw.githubusercontent.com/arijitray1993/COLA/main/data/"
              "COLA_multiobjects_matching_benchmark.json"),),
        ("grep -oE 'https?://[^\"]+[.]jpg' OUT/COLA_multiobjects_matching_benchmark.json | sort -u | "
         "wget -nc -P OUT/images -i -", "# gives OUT/images/2414605.jpg, ... for --dataset cola")),
    "negbench": Source(
        "MIT, with photographs of COCO and Pascal VOC",
        (VAL2017,),
        ("# get *_mcq_llama3.1_rephrased.csv by the link in https://github.com/m1k2zoo/negbench/blob/main/datasets.md",
         "unzip -q -d OUT OUT/val2017.zip", "# put VOC2007's images in OUT/JPEGImages, for --dataset negbench/coco")),
    "colorswap": Source(
        "MIT, with generated images",
        commands=("# get the data by the link in https://github.com/Top34051/colorswap, then",
                  "unzip -q -d OUT images.zip",
                  "# gives OUT/test.json, OUT/images/img_0_1.png, ... for --dataset colorswap")),
    "nlvr": Source(
        "see its repository, with rendered images",
        commands=("git clone --depth 1 https://github.com/lil-lab/nlvr OUT",
                  "# gives OUT/nlvr/dev/dev.json, OUT/nlvr/dev/images/*/dev-*.png for --dataset nlvr/dev")),
    "mmvp_vlm": Source(
        "MIT",
        commands=("hf download MMVP/MMVP_VLM --repo-type dataset --local-dir OUT",
                  "# gives OUT/Questions.csv, OUT/MLLM_VLM Images/*/*.jpg for --dataset mmvp_vlm")),
    "cub": Source(
        "non-commercial research and education, photographs owned by their photographers",
        (File("https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz", "",
              "md5:97eceeb196236b17998738112f37df78"),),
        ("tar -xf OUT/CUB_200_2011.tgz -C OUT",
         "gdown 0B0ywwgffWnLLZW9uVHNjb2JmNlE -O OUT/cvpr2016_cub.tar.gz && tar -xf OUT/cvpr2016_cub.tar.gz -C OUT",
         "python -m experiments.prepare_cub --images OUT/CUB_200_2011/images --captions OUT/cvpr2016_cub/text_c10 "
         "--split reed --classes OUT/cvpr2016_cub/trainvalclasses.txt OUT/cvpr2016_cub/testclasses.txt "
         "--out OUT/shards")),
}


def is_json(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_bytes()))
    except ValueError:
        return False


def is_tar(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (EOFError, zlib.error):  # compressed, but not to the end
        return False


def is_tsv(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(2 ** 20).strip()
    return b"\t" in first and not first.startswith(b"<")


KINDS = {".zip": zipfile.is_zipfile, ".tgz": is_tar, ".json": is_json, ".tsv": is_tsv}


def ask(url: str, **headers: str) -> requests.Response:
    try:
        return requests.get(url, stream=True, timeout=TIMEOUT, headers={"Accept-Encoding": "identity", **headers})
    except (requests.exceptions.InvalidSchema, requests.exceptions.InvalidURL, requests.TooManyRedirects) as problem:
        raise ValueError(f"{url} sends on to an address that cannot be fetched: {problem}") from problem


def open_rest(url: str, part: Path) -> requests.Response:
    start = part.stat().st_size if part.exists() else 0
    answer = ask(url, **({"Range": f"bytes={start}-"} if start else {}))
    if answer.status_code == 206 and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        answer.close()
        answer = ask(url)
    if answer.status_code != 416:  # which says that the file is complete
        answer.raise_for_status()
    return answer


def identity(file: File, answer: requests.Response) -> str:
    # Tells this file from a later one at the same address. Redirects are left out, as their signatures change.
    known = [file.url, *(answer.headers.get(name, "") for name in ("ETag", "Last-Modified", "Content-Length"))]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]


def append(answer: requests.Response, part: Path, bar) -> None:
    if answer.status_code == 416:
        return
    with open_own(part, "ab" if answer.status_code == 206 else "wb") as file:
        bar.n = file.tell()
        for block in answer.iter_content(2 ** 16):
            bar.update(file.write(block))


def download(file: File, folder: Path) -> Path:
    """Download the file unless it is there, and return its path.

    Raises OSError if the server breaks off too often, ValueError for a wrong size, checksum or kind.
    """
    target, tries, size = folder / file.name, 0, -1
    if target.exists():
        if problem := find_problem(file, target, None):
            raise ValueError(f"{target} {problem}: remove it, and run the same command to fetch it again")
        return target
    with ask(file.url) as head:
        head.raise_for_status()
        part = folder / f".{file.name}.{identity(file, head)}.part"
        length = head.headers.get("Content-Length")
        if length is not None and not length.isdecimal():
            raise ValueError(f"{file.url} answers with a Content-Length of {length!r}, which is no number")
    with progress_bar(total=length and int(length), what=file.name, unit="B", unit_scale=True) as bar:
        while True:
            try:
                with open_rest(file.url, part) as answer:
                    append(answer, part, bar)
                break
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as problem:
                before, size = size, part.stat().st_size if part.exists() else 0
                tries = 0 if size > before else tries + 1
                if tries == TRIES:
                    raise OSError(f"{file.url} broke off {TRIES} times at byte {size}: run the same command to resume "
                                  f"({problem})") from problem
                time.sleep(tries)
    problem = find_problem(file, part, length)
    if problem:
        part.unlink()
        raise ValueError(f"{file.url} {problem}: it was removed, run the same command to fetch it again")
    os.replace(part, target)
    for other in folder.glob(f".{escape(file.name)}.{'?' * 12}.part"):  # parts of an earlier version
        other.unlink(missing_ok=True)
    return target


def find_problem(file: File, part: Path, length: str | None) -> str | None:
    if length is not None and part.stat().st_size != int(length):
        return f"has {part.stat().st_size} bytes, not {length}"
    if file.checksum:
        algorithm, _, wanted = file.checksum.partition(":")
        if (found := hash_file(part, algorithm)) != wanted:
            return f"has the {algorithm} {found}, not {wanted}"
    elif not KINDS[Path(file.name).suffix](part):
        with part.open("rb") as content:
            return f"is no {Path(file.name).suffix} file: it begins with {content.read(40)!r}"
    return None


def run(args: argparse.Namespace) -> None:
    source, folder = SOURCES[args.source], Path(args.out)
    commands = [command.replace("OUT", for_shell(args.out)) for command in source.commands]
    print(f"licence: {source.licence}")
    if args.print:
        for file in source.files:
            size = f" ({file.size})" if file.size else ""
            print(f"{file.url}{size} {file.checksum or '(no checksum known)'}")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.files:
            print(download(file, folder))
        commands = ["then run:", *commands] if commands else []
    print(*commands, sep="\n", end="\n" * bool(commands))
