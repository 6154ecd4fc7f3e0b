"""Classifiers on the features of a model that is not trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Split = tuple[np.ndarray, np.ndarray]
"""Indices of the images that a classifier is fitted on, and of those it is tested on."""


def split_by_class(labels: np.ndarray, count: int) -> list[Split]:
    """Return `count` splits in which every image is tested once, by a classifier fitted on the others."""
    from sklearn.model_selection import StratifiedKFold

    numbers, counts = np.unique(labels, return_counts=True)
    if counts.min() < count:
        raise ValueError(
            f"folds={count} needs as many images of every class, class {numbers[counts.argmin()]} has {counts.min()}"
        )
    return list(StratifiedKFold(count, shuffle=True, random_state=0).split(labels, labels))


def nearest_neighbours(features: np.ndarray, labels: np.ndarray, splits: Sequence[Split], k: int) -> np.ndarray:
    """Return which tested images their k nearest neighbours by cosine, weighted by distance, classify correctly.

    1 where correct, else 0, in the order of the images (tested images,).

    Example:
        >>> x = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> nearest_neighbours(x, np.array([0, 0, 1, 1]), [(np.array([0, 2]), np.array([1, 3]))], k=1)
        array([1, 1])
    """
    from sklearn.neighbors import KNeighborsClassifier

    return _tested(KNeighborsClassifier(k, metric="cosine", weights="distance"), features, labels, splits)


def linear_probe(
    features: np.ndarray, labels: np.ndarray, splits: Sequence[Split], strengths: Sequence[float]
) -> np.ndarray:
    """Return which tested images a logistic regression on standardised features classifies correctly.

    scikit-learn's `C` is chosen among `strengths` by cross-validation in the images it is fitted on. 1 where correct,
    else 0, in the order of the images (tested images,).
    """
    return _tested(_regression(strengths, 3), features, labels, splits)


def predict_linearly(
    fitted: np.ndarray, labels: np.ndarray, tested: np.ndarray, images: np.ndarray, strengths: Sequence[float]
) -> np.ndarray:
    """Return the classes that a logistic regression on standardised features of patches predicts for tested patches.

    Cross-validation chooses `C` with all patches of an image on the same side; `images` numbers the image of every
    fitted patch.
    """
    from sklearn.model_selection import GroupKFold

    split = list(GroupKFold(3).split(fitted, labels, images))
    guesses: np.ndarray = _regression(strengths, split).fit(fitted, labels).predict(tested)
    return guesses


def _regression(strengths: Sequence[float], cv: Any) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(strengths) == 1:
        return make_pipeline(StandardScaler(), LogisticRegression(C=strengths[0], max_iter=1000, tol=1e-3))
    regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, tol=1e-3))
    return GridSearchCV(regression, {"logisticregression__C": list(strengths)}, cv=cv)


def _tested(classifier: Any, features: np.ndarray, labels: np.ndarray, splits: Sequence[Split]) -> np.ndarray:
    from sklearn.base import clone

    right = np.full(len(labels), -1)
    for fitted, tested in splits:
        guesses = clone(classifier).fit(features[fitted], labels[fitted]).predict(features[tested])
        right[tested] = guesses == labels[tested]
    return right[right >= 0]
