"""lmms-eval's `--model open_clip_mdc`: captions, yes or no, and choices by their likelihood.

Answers are yielded one after another, not returned as a list. So lmms-eval's response cache (`--use_cache`) has each of
them when the next one is computed, and a run that is killed resumes there.

Dimensions: B images, C captions of an image, P patches, D width.
"""
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from accelerate import Accelerator
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from PIL import Image
from torch import Tensor

from open_clip_mdc.decoding.options import NULL_IMAGES, spread
from open_clip_mdc.errors import Refusal
from open_clip_mdc.integration.pretrained import SCORES, load

from .questions import asks_for_caption, statement


@contextmanager
def refusals():
    """End the process with one line for bad input. lmms-eval answers other errors with a traceback and status 0."""
    try:
        yield
    except (ValueError, TypeError, OSError) as problem:
        raise Refusal(f"--model open_clip_mdc: {problem}") from problem


def batches(requests: Sequence[Instance], key: Callable[[Instance], Any], size: int) -> Iterator[tuple[Any, list]]:
    """Yield (key, up to `size` requests that follow one another and share the key)."""
    for shared, some in groupby(requests, key):
        some = list(some)
        yield from ((shared, some[start:start + size]) for start in range(0, len(some), size))


def picture_of(visuals: Any, task: str) -> Image.Image:
    """Return the one image of a document. Raises ValueError for several, and for a video."""
    if isinstance(visuals, (list, tuple)) and len(visuals) == 1 and isinstance(visuals[0], Image.Image):
        return visuals[0]
    raise ValueError(f"task {task}: a captioner reads one image, but a document of this task has "
                     f"{[type(visual).__name__ for visual in visuals or ()]}")


class OpenClipMdc(lmms):
    """A captioner for lmms-eval.

    Args:
        pretrained, model, device, precision: as those of `open_clip_mdc.load`.
        kind: by what choices are compared: "plain", "blind" or "debiased" (`PretrainedCaptioner.score`).
        blind_images: a folder of 32 images or more, whose mean is the null image. The default are 256 images spread
            over the task's own.
        options: options of `PretrainedCaptioner.caption`, such as length=15. The task's generation_kwargs are not read.
    """

    def __init__(self, pretrained: str = "photo", model: str | None = None, kind: str = "debiased",
                 blind_images: str | None = None, precision: str | None = None, device: str | None = None,
                 batch_size: int | str = 1, max_batch_size: int | None = None, **options):
        super().__init__()
        self.accelerator = Accelerator()
        self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        with refusals():
            if kind not in SCORES:
                raise ValueError(f"kind is {kind!r}: it must be one of {', '.join(SCORES)}")
            self.batch_size, self.kind, self.options = int(batch_size), kind, options
            own = str(self.accelerator.device) if self._world_size > 1 else device
            self.captioner = load(pretrained, model, own, precision)
            self.blind_images = None if blind_images is None else self.captioner.mean_image(blind_images)
            if "guidance_scale" in options:
                options["blind_images"] = self.blind_images
            self.captioner.caption(Image.new("RGB", (64, 64)), **options)  # refuses them before the data are read
        self.null_images: dict[tuple[str, str], Tensor] = {}

    def _picture(self, request: Instance) -> Image.Image:
        *_, to_visual, document, task, split = request.args
        return picture_of(to_visual(self.task_dict[task][split][document]), task)

    def _null_image(self, request: Instance) -> Tensor:
        """Return the null image [P, D] of a task, the same whichever of its answers come from the cache."""
        *_, to_visual, _, task, split = request.args
        if self.blind_images is not None:
            return self.blind_images
        if (task, split) not in self.null_images:
            documents = self.task_dict[task][split]
            self.null_images[task, split] = self.captioner.mean_image(
                [picture_of(to_visual(documents[i]), task) for i in spread(range(len(documents)))[:NULL_IMAGES]])
        return self.null_images[task, split]

    def _score(self, requests: Sequence[Instance], captions: list[list[str]]) -> Tensor:
        """Return scores of captions in nats, [B, C]. `requests` are of one task, one for each image."""
        given = {} if self.kind == "plain" else {"blind_images": self._null_image(requests[0])}
        return self.captioner.score(list(map(self._picture, requests)), captions, self.kind,
                                    batch_size=len(requests), **given)

    def generate_until(self, requests: list[Instance]) -> Iterator[str]:
        """Yield a caption, or "yes" or "no" to whether a thing is there. Any other question ends the process.

        It is there if "a photo of a dog ." is more probable with the image than without, as in NLVR.
        """
        def kind(request: Instance) -> tuple[str, bool]:
            question, task = request.args[0], request.task_name
            if statement(question) is None and not asks_for_caption(question):
                raise ValueError(f"task {task} asks {question[:80]!r}: a captioner answers no question but for a "
                                 "caption, or 'Is there a dog in the image?'")
            if statement(question) and self.kind != "debiased":
                raise ValueError(f"task {task} asks yes or no, which needs kind=debiased: yes is what the image makes "
                                 "more probable")
            return task, statement(question) is None

        with refusals():
            for (_, wants_caption), some in batches(requests, kind, self.batch_size):
                if wants_caption:
                    yield from self.captioner.caption(list(map(self._picture, some)), batch_size=len(some),
                                                      **self.options)
                else:
                    scores = self._score(some, [[statement(request.args[0])] for request in some])
                    yield from ("yes" if score > 0 else "no" for score in scores.flatten().tolist())

    def loglikelihood(self, requests: list[Instance]) -> Iterator[tuple[float, bool]]:
        """Yield minus the score of each choice, in nats, as lmms-eval takes the choice of the least loss.

        The second value says that the choice is not known to be the caption that decoding would give.
        """
        with refusals():
            for request in requests:
                if len(request.args) != 6 or not asks_for_caption(request.args[0]):
                    raise ValueError(f"task {request.task_name} asks {request.args[0][:80]!r}: a captioner compares "
                                     "choices that are captions, by a task whose question asks for a caption")
            documents = [list(some) for _, some in groupby(requests, lambda request: request.args[3:])]
            for _, some in batches(documents, lambda own: (own[0].task_name, len(own)), self.batch_size):
                scores = self._score([own[0] for own in some], [list(map(self._choice, own)) for own in some])
                yield from ((-score, False) for score in scores.flatten().tolist())

    def _choice(self, request: Instance) -> str:
        choice, (_, _, document, task, split) = request.args[1], request.args[1:]
        return (choice if isinstance(choice, str) else choice(self.task_dict[task][split][document])).strip()

    def generate_until_multi_round(self, requests: list[Instance]):
        """End the process, as a captioner has no conversations."""
        raise Refusal(f"--model open_clip_mdc: task {requests[0].task_name} is a conversation: a captioner has none")
