"""Which iris it is: the nearer its mean flower, the likelier. A model of Seldon Core."""

import numpy as np

MEANS = np.array([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])


class Flowers:
    def __init__(self, columns="0,1,2,3"):
        self.columns = [int(column) for column in columns.split(",")]

    def predict(self, X, names, meta=None):
        distances = ((X[:, None, self.columns] - MEANS[None, :, self.columns]) ** 2).sum(axis=2)
        nearness = np.exp(-distances)
        return nearness / nearness.sum(axis=1, keepdims=True)

    def class_names(self):
        return ["setosa", "versicolor", "virginica"]
