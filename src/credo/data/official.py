"""Addresses, sizes and digests of the official files.

The SHA-256 of downloads are those that TensorFlow Datasets publishes for these addresses. Those of the three
LSUN-like sets have only a published MD5 (see `Remote`). The SHA-256 of contents were computed from files whose
published SHA-1 (CIFAR-10) or MD5 (MNIST) had been verified; they hold for every copy, whoever compressed it.
"""

from credo.data.download import Remote
from credo.data.verify import Entry

_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_SVHN = "http://ufldl.stanford.edu/housenumbers"
_ODIN = "https://www.dropbox.com/s/raw"
_ODIN_LIMIT = 300_000_000  # bytes; the exact sizes are not published

CIFAR10 = (
    Remote(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
)
MNIST = (
    Remote(
        f"{_MNIST}/train-images-idx3-ubyte.gz",
        9_912_422,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    Remote(
        f"{_MNIST}/train-labels-idx1-ubyte.gz",
        28_881,
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    Remote(
        f"{_MNIST}/t10k-images-idx3-ubyte.gz",
        1_648_877,
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    Remote(
        f"{_MNIST}/t10k-labels-idx1-ubyte.gz",
        4_542,
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
)
FASHION_MNIST = (
    Remote(
        f"{_FASHION}/train-images-idx3-ubyte.gz",
        26_421_880,
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    Remote(
        f"{_FASHION}/train-labels-idx1-ubyte.gz",
        29_515,
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    Remote(
        f"{_FASHION}/t10k-images-idx3-ubyte.gz",
        4_422_102,
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    Remote(
        f"{_FASHION}/t10k-labels-idx1-ubyte.gz",
        5_148,
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)
SVHN = (
    Remote(
        f"{_SVHN}/train_32x32.mat",
        182_040_794,
        "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    ),
    Remote(
        f"{_SVHN}/test_32x32.mat",
        64_275_384,
        "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    ),
)
IMAGENETTE = (
    Remote(
        "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz",
        341_663_724,
        "569b4497c98db6dd29f335d1f109cf315fe127053cedf69010d047f0188e158c",
    ),
)
LSUN_CROP = (
    Remote(
        f"{_ODIN}/fhtsw1m3qxlwj6h/LSUN.tar.gz",
        _ODIN_LIMIT,
        md5="458a0a0ab8e5f1cb4516d7400568e460",
        exact=False,
    ),
)
LSUN_RESIZE = (
    Remote(
        f"{_ODIN}/moqh2wh8696c3yl/LSUN_resize.tar.gz",
        _ODIN_LIMIT,
        md5="278b7b31c8cb7e804a1465a8ce03a2dc",
        exact=False,
    ),
)
TINYIMAGENET_RESIZE = (
    Remote(
        f"{_ODIN}/kp3my3412u5k9rl/Imagenet_resize.tar.gz",
        _ODIN_LIMIT,
        md5="0f9ff11d45babf2eff5fe12281d1ac31",
        exact=False,
    ),
)

CONTENTS = {
    "cifar10": {
        "data_batch_1.bin": Entry(
            30_730_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"
        ),
        "data_batch_2.bin": Entry(
            30_730_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"
        ),
        "data_batch_3.bin": Entry(
            30_730_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"
        ),
        "data_batch_4.bin": Entry(
            30_730_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"
        ),
        "data_batch_5.bin": Entry(
            30_730_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"
        ),
        "test_batch.bin": Entry(
            30_730_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"
        ),
    },
    "mnist": {  # unpacked
        "train-images-idx3-ubyte": Entry(
            47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        "train-labels-idx1-ubyte": Entry(
            60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
        ),
        "t10k-images-idx3-ubyte": Entry(
            7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
        ),
        "t10k-labels-idx1-ubyte": Entry(
            10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
        ),
    },
}
