SELECT version_num FROM "flotilla".alembic_version
