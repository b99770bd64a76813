SET enable_seqscan = off; SET jit = off; SET plan_cache_mode = force_generic_plan; SET enable_nestloop = off
