INSERT INTO "flotilla".breakers (name) VALUES (%(name)s) ON CONFLICT (name) DO NOTHING
