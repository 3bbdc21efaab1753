"""
An example that is the same under gpunb
=======================================

"""

import matplotlib.pyplot as plt
import numpy as np

rng = np.random.default_rng(0)
values = rng.normal(size=100)
print(f"{values.mean():.3f}")

# %%
# A function of the first cell
# ----------------------------


def scaled(factor):
    return values * factor


halves = scaled(0.5)
halves.std()

# %%

fig, ax = plt.subplots(figsize=(2, 1))
z1 = np.linspace(0, 1, 3)
z2 = z1  # two names for one object
ax.plot(halves)
ax.set_title("halves")
