"""The empty root of the service's own migrations: the parent of your first migration."""

revision = "app_0001"
down_revision = None
branch_labels = ("app",)
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
