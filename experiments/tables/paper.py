"""Numbers of the paper (arXiv 2510.26799), to print beside ours. Its text has none for Figures 4 and 5.

Table 1 is the accuracy of linear probes in %, with the columns PROBES, keyed by (captions, backbone, method). Tables 4
and 5 are on ImageNet.
"""
from statistics import fmean

PROBES = ("ImageNet", "Food101", "CIFAR-10", "CIFAR-100", "Pets")

TABLE1 = {
    ("CC12M", "ViT-B-32", "CLIP"): (57.2, 66.4, 89.2, 70.9, 74.8),
    ("CC12M", "ViT-B-32", "ARC"): (54.2, 67.7, 87.5, 68.3, 70.0),
    ("CC12M", "ViT-B-32", "MDC"): (54.8, 64.5, 88.4, 69.3, 66.7),
    ("Recap-10M", "ViT-B-32", "CLIP-LB"): (55.5, 66.4, 91.0, 75.4, 66.1),
    ("Recap-10M", "ViT-B-32", "CLIP"): (53.1, 66.0, 90.5, 75.0, 63.9),
    ("Recap-10M", "ViT-B-32", "ARC"): (61.4, 76.0, 94.1, 79.1, 70.7),
    ("Recap-10M", "ViT-B-32", "MDC"): (60.7, 72.1, 93.9, 78.6, 67.6),
    ("CC12M", "ViT-B-16", "CLIP"): (67.3, 76.5, 91.5, 74.7, 82.3),
    ("CC12M", "ViT-B-16", "ARC"): (64.7, 79.0, 91.1, 72.8, 79.4),
    ("CC12M", "ViT-B-16", "MDC"): (65.9, 76.0, 91.6, 75.1, 77.3),
    ("Recap-10M", "ViT-B-16", "CLIP-LB"): (62.8, 74.4, 92.4, 77.8, 73.6),
    ("Recap-10M", "ViT-B-16", "CLIP"): (60.4, 73.1, 92.3, 77.2, 71.0),
    ("Recap-10M", "ViT-B-16", "ARC"): (69.5, 84.5, 95.4, 81.3, 72.4),
    ("Recap-10M", "ViT-B-16", "MDC"): (69.0, 81.3, 95.2, 81.6, 73.9),
    ("CC12M", "ViT-L-14", "CLIP"): (70.1, 79.2, 93.9, 77.7, 84.3),
    ("CC12M", "ViT-L-14", "ARC"): (69.7, 79.8, 92.7, 76.1, 82.9),
    ("CC12M", "ViT-L-14", "MDC"): (69.9, 78.8, 93.0, 76.7, 84.6),
    ("Recap-10M", "ViT-L-14", "CLIP-LB"): (64.8, 76.3, 93.4, 78.6, 75.4),
    ("Recap-10M", "ViT-L-14", "CLIP"): (62.1, 75.1, 93.1, 78.1, 73.2),
    ("Recap-10M", "ViT-L-14", "ARC"): (71.2, 84.8, 96.1, 82.7, 81.9),
    ("Recap-10M", "ViT-L-14", "MDC"): (71.6, 83.4, 95.3, 81.4, 83.8),
}


def average(captions: str, network: str, method: str) -> float:
    return round(fmean(TABLE1[captions, network, method]), 1)


SELECTIONS = ("ARO relation", "ARO attribute", "COCO order", "Flickr30k order",
              "SugarCrepe add", "SugarCrepe replace", "SugarCrepe swap")
TABLE2 = {
    "CLIP": (53.6, 59.7, 27.2, 29.5, 66.5, 72.8, 61.3),
    "ARC": (82.7, 76.0, 97.7, 98.4, 97.6, 77.4, 76.9),
    "MDC (Monte Carlo)": (85.1, 84.3, 89.0, 89.0, 85.6, 75.8, 75.2),
    "MDC (heuristic)": (84.6, 81.2, 98.4, 98.8, 97.8, 77.9, 78.5),
}

CAPTION_METRICS = ("B@4", "METEOR", "CIDEr", "SPICE", "ROUGE-L", "LLM")  # the last is the judge's selection rate
TABLE3 = {
    ("MSCOCO", "CoCa"): (21.95, 21.41, 67.61, 20.92, 43.12),
    ("MSCOCO", "ARC"): (16.0, 23.9, 48.8, 17.4, 38.6, 33.9),
    ("MSCOCO", "MDC-10"): (20.7, 14.3, 64.7, 16.0, 42.2, 19.2),
    ("MSCOCO", "MDC-15"): (17.6, 23.1, 51.1, 18.3, 40.7, 23.6),
    ("MSCOCO", "MDC-20"): (13.6, 31.9, 24.1, 18.6, 37.0, 23.3),
    ("Flickr30k", "ARC"): (10.1, 20.2, 19.3, 13.4, 30.8, 30.2),
    ("Flickr30k", "MDC-10"): (11.3, 17.9, 20.5, 10.8, 30.3, 18.0),
    ("Flickr30k", "MDC-15"): (15.3, 21.4, 28.6, 14.9, 35.0, 25.7),
    ("Flickr30k", "MDC-20"): (13.8, 21.7, 20.6, 15.5, 34.3, 26.0),
}

TABLE4 = {("CC12M", "MDC (w/o t)"): 54.0, ("CC12M", "MDC"): 54.8,
          ("Recap-10M", "MDC (w/o t)"): 59.5, ("Recap-10M", "MDC"): 60.7}

TABLE5 = {"[0.0, 1.0]": 29.3, "[0.3, 0.8]": 36.1, "[0.4, 0.9]": 38.6, "[0.5, 1.0]": 39.2}
