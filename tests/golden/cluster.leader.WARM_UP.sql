SELECT has_table_privilege('"flotilla".leader_turn'::regclass, 'UPDATE')
