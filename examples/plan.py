"""Asks the planner which layout to take on GPUs that are not here, and what that training costs.

    python examples/plan.py
    tfdist-run -np 2 -- python examples/plan.py

`tfdist.addons.planner` tries all layouts on paper: which fit, how long a step takes, what binds it. It needs neither
the GPUs nor the model. Of a model that Keras has built it tells FLOPs, memory and messages, too. The text that
is trained on, the reference of Python, comes with Python.
"""

import keras

import tfdist
from tfdist.addons import planner

strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

if strategy.is_chief:
    # 6.7 billion parameters on 16 GPUs of 40 GiB: with Adam, states alone take 100 GiB.
    large = planner.Transformer(layers=32, width=4096, heads=32, vocabulary=50_257, length=2048)
    found = planner.plan(
        large,
        planner.machine("a100", memory="40GiB"),
        global_batch=128,
        ranks=16,
        limits=planner.Limits(dtype="mixed_bfloat16", axes=("data", "tensor")),
    )
    print(found)

    # A training on 100 billion tokens, on GPUs of which each fails every 5,000 hours.
    cost = planner.goodput.run_cost(found.best[0], planner.machine("a100", price=2.0), tokens=1e11)
    print(f"{cost.seconds / 86_400:.0f} days of 16 GPUs cost {cost.price:,.0f}.")
    size = planner.goodput.checkpoint_bytes(found.best[0])
    job = planner.simulate_job(
        16,
        planner.JobTimes(checkpoint=size, storage=1e10, write=1e9),
        mtbf_hours=5_000,
        training_hours=cost.seconds / 3600,
    )
    print(f"{job.failures} failures; {job.goodput:.1%} of {job.seconds / 86_400:.0f} days train.")

with strategy.scope():
    model = tfdist.models.gpt(256, num_layers=2, width=32, num_heads=4, max_length=64)
    model.compile(
        keras.optimizers.AdamW(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )

# One core as a machine. `tfdist-plan calibrate` measures what that of one's own does.
core = planner.Machine(
    flops={"float32": 5e10},
    memory=2 << 30,
    memory_bandwidth=1e10,
    inside=planner.Link(latency=3e-5, bandwidth=2e9),
)
cost = planner.estimate(
    planner.describe(model), core, planner.Layout(data=strategy.mesh.size), global_batch=32
)

text = tfdist.addons.datasets.load_text("pydoc").train
windows = tfdist.addons.datasets.language_model_windows(text, 64).take(512)
history = model.fit(windows.batch(32), epochs=2, verbose=2, shuffle=False)
if strategy.is_chief:
    print(
        f"A step: {cost.flops / 1e6:,.0f} million FLOPs; a rank holds {cost.memory.total / 2**20:.1f} MiB,"
        f" and sends {cost.traffic['data'] / 2**20:.2f} MiB."
    )
    print(f"Loss {history.history['loss'][-1]:.4f} on {strategy.mesh.size} rank(s).")
