"""The training program: example model, trainer, checkpoints. The loader works without any of it.

One step, from its start to its line in the log:

    program           reads the run's file (config), starts the ranks (devices), makes a Trainer
    trainer           Trainer.run: step after step; Trainer.train_step: one of them, with the sums over
                      ranks; Trainer.evaluate_all: the valid split, and validation sets
    parallel_model    forward and backward of its micro-batches, sums of gradients, their norm;
                      several pipeline stages run in `pipeline`
    inputs, losses    what a stage is given of a micro-batch; its loss
    optimizer         AdamW, the learning rate of the step, the scale of fp16 losses
    checkpoints/      saves in the background, and resumes
    run_log           metrics.jsonl, the line in the log

The model: `model`, `attention`; cut, split and sharded by `stages`. What fails: `signals` end a run with
a checkpoint, `parallel.rank_sync` gives all ranks one error, and `config_check` compares them at the start,
and the global batches of runs.
"""
