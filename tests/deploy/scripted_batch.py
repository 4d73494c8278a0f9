"""A batch that does what a test says, in the place of one that samples."""


class ScriptedBatch:
    """Runs a function of the test's choice at every step, with all that was taken on so far."""

    def __init__(self, step):
        self.taken_on = []
        self._step = step

    def add(self, more):
        self.taken_on += more

    def step(self):
        return self._step(self.taken_on)
