SELECT has_schema_privilege('flotilla', 'CREATE')
