# %%
import os

os.environ["SMALL_EXAMPLE"] = "1"
values = [1, 2]

# %%
values.append(os.environ.get("SMALL_EXAMPLE"))
print("the variable is", values[-1])
