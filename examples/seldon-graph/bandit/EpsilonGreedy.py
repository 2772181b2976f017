"""Which branch answers: mostly the one whose rewards were best so far. A router of Seldon Core."""

import random


class EpsilonGreedy:
    def __init__(self, branches, epsilon=0.1, seed=None):
        self.epsilon = epsilon
        self.random = random.Random(seed)
        self.rewards = [[1, 1.0] for _ in range(branches)]  # how many, and their sum: one is lent to each

    def route(self, features, feature_names):
        if self.random.random() < self.epsilon:
            return self.random.randrange(len(self.rewards))
        means = [total / count for count, total in self.rewards]
        return means.index(max(means))

    def send_feedback(self, features, feature_names, reward, truth, routing=None):
        self.rewards[routing][0] += 1
        self.rewards[routing][1] += reward

    def metrics(self):
        return [
            {"type": "GAUGE", "key": "bandit_mean_reward", "value": total / count, "tags": {"branch": str(branch)}}
            for branch, (count, total) in enumerate(self.rewards)
        ]
