"""Where the service's own tables begin: an empty root, so that your first migration has a parent."""

revision = "app_0001"
down_revision = None
branch_labels = ("app",)
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
