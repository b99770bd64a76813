SELECT min(run_at) - clock_timestamp() FROM "flotilla".runs WHERE state = 'pending' AND run_at > clock_timestamp()
