LOCK TABLE "flotilla".leader_turn IN EXCLUSIVE MODE
