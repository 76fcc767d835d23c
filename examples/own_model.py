"""Your own model on your own arrays: train, calibrate, predict with uncertainty, save and load.

    python -m examples.own_model

Replace `arrays` and `build_model` by yours; nothing else has to change.
"""

import numpy as np
import torch
import torch.nn.functional as F

import credo


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Inputs (n, features) and class numbers (n,): here two rings of points."""
    random = np.random.default_rng(0)
    classes = random.integers(0, 2, 900)
    angle, radius = random.uniform(0, 2 * np.pi, 900), 1.0 + classes + 0.25 * random.standard_normal(900)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32), classes


def build_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))


def main(path: str = "own_model.safetensors", epochs: int = 60) -> dict[str, float]:
    x, y = map(torch.as_tensor, arrays())
    train, validation, test = torch.arange(len(x)).split([600, 150, 150])

    torch.manual_seed(0)
    model = build_model()
    optimizer = credo.VOGN(model, data_size=len(train))
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(50):
            optimizer.zero_grad()
            with optimizer.sampled():
                F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()

    found = credo.calibrate(model, optimizer.posterior(), (x[validation], y[validation]), samples=30)
    found.posterior.save(path)

    # Later, in another program: a fresh model and the file are enough.
    posterior = credo.load_posterior(path)
    prediction = credo.predict(build_model(), posterior, x[test], samples=30, **found.options)
    scores = credo.evaluate(prediction, y[test])
    print({name: round(value, 3) for name, value in scores.items()})
    right = prediction.probs.argmax(1) == y[test]
    for name, some in (("right", right), ("wrong", ~right)):
        print(f"entropy of {name} answers: {prediction.entropy[some].mean():.2f} nats")
    return scores


if __name__ == "__main__":
    main()
