"""Small files in the official formats, written by the plainest code that can, and the data they hold."""

import gzip
import io
import pickle
import struct
from pathlib import Path

import numpy as np
import scipy.io
import torch
from PIL import Image
from torch import Tensor


def images(count: int, channels: int = 3, side: int = 32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, channels, side, side), generator=generator, dtype=torch.uint8)


def labels(count: int, classes: int = 10) -> Tensor:
    return torch.arange(count) % classes


def cifar_binary(x: Tensor, y: Tensor) -> bytes:
    return b"".join(bytes([int(k)]) + image.numpy().tobytes() for image, k in zip(x, y, strict=True))


def cifar_python(x: Tensor, y: Tensor, protocol: int = 2) -> bytes:
    batch = {b"data": x.numpy().reshape(len(x), -1), b"labels": y.tolist(), b"batch_label": b"a test"}
    return pickle.dumps(batch, protocol)


def idx(values: Tensor) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.to(torch.uint8).numpy().tobytes()


def idx_gz(values: Tensor) -> bytes:
    return gzip.compress(idx(values), mtime=0)


def svhn(x: Tensor, y: Tensor, compressed: bool = False) -> bytes:
    stream = io.BytesIO()
    official = np.where(y.numpy() == 0, 10, y.numpy()).astype(np.uint8)[:, None]
    content = {"X": x.numpy().transpose(2, 3, 1, 0), "y": official}
    scipy.io.savemat(stream, content, do_compression=compressed)
    return stream.getvalue()


def picture(image: Tensor, form: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(stream, form)
    return stream.getvalue()


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def notmnist_folder(root: Path, count: int = 6) -> tuple[Tensor, Tensor]:
    x, y = images(count, 1, 28), labels(count)
    write(root / "notMNIST/raw/t10k-images-idx3-ubyte.gz", idx_gz(x[:, 0]))
    write(root / "notMNIST/raw/t10k-labels-idx1-ubyte.gz", idx_gz(y))
    return x, y


def svhn_folder(root: Path, count: int = 5) -> tuple[Tensor, Tensor]:
    x, y = images(count), labels(count)
    write(root / "SVHN/test_32x32.mat", svhn(x, y))
    return x, y


def scenes_folder(root: Path, count: int = 4) -> Tensor:
    x = images(count)
    for k, image in enumerate(x):
        write(root / f"scenes_crop/{k:05d}.png", picture(image))
    return x


def imagenette_folder(root: Path) -> dict[str, Tensor]:
    written = {}
    for half, per_class in (("train", 3), ("val", 2)):
        for number, wnid in enumerate(("n01", "n02")):
            for k in range(per_class):
                name = f"imagenette/{half}/{wnid}/{k}.JPEG"
                written[name] = images(1, 3, 256, seed=10 * number + k)[0]
                write(root / name, picture(written[name], "PNG"))  # lossless under the official name
    return written


def uci_folder(root: Path) -> Tensor:
    table = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    texts = {
        "data.txt": "\n".join(" ".join(map(repr, row)) for row in table.tolist()) + "\n\n",
        "index_features.txt": "0\n1\n",
        "index_target.txt": "2\n",
        "index_train_0.txt": "\n".join(f"{k:.18e}" for k in range(8)),
        "index_test_0.txt": "8\n9\n",
    }
    for name, text in texts.items():
        write(root / "uci/yacht" / name, text.encode())
    return table
