"""Row lengths in, a step plan out: what another trainer needs to run evenstep's plans. No torch."""

from evenstep.plan import plan_step

lengths = [4096, 350, 1200, 900, 2048, 77, 640, 3000, 512, 1500]  # tokens of each row of one optimizer step
plan = plan_step(lengths, num_ranks=2, max_tokens_per_gpu=4096, layout="packed")
for k in range(plan.num_microbatches):
    for rank in range(plan.num_ranks):
        rows = plan.cells[rank][k]  # run forward and backward on these rows; () means an inert filler of two tokens
        print(f"micro-batch {k}, rank {rank}: rows {rows}, {sum(lengths[i] for i in rows)} tokens")
print(f"{plan.stats.lockstep_efficiency:.1%} of the lower bound, {plan.stats.num_fillers} fillers")
