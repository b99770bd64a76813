# One image for all parts of a deployment: by default it serves, and `flotilla migrate`, `flotilla list` and all other
# commands use the same image.
#
# The project runs from its source: app/fleet/db/migrations.py finds the migrations beside `app/`. So there is nothing to
# build, and no build tool to pin. The command `flotilla` is three lines of Python.

# For reproducible builds, give the base image by its digest: --build-arg BASE=python@sha256:…
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
RUN python -m venv /opt/venv
COPY requirements.lock /tmp/
# Only packages with a hash in the lock file are installed, and only wheels, which run no code at build time.
RUN /opt/venv/bin/pip install --no-cache-dir --require-hashes --only-binary=:all: --requirement /tmp/requirements.lock \
 && /opt/venv/bin/pip uninstall --yes pip
# Without a shell, so that Python itself is process 1 and receives the signals.
RUN printf '#!/opt/venv/bin/python\nfrom app.fleet.cli import main\nmain()\n' > /opt/venv/bin/flotilla \
 && chmod 755 /opt/venv/bin/flotilla

COPY alembic.ini /srv/flotilla/
COPY alembic /srv/flotilla/alembic
COPY app /srv/flotilla/app
WORKDIR /srv/flotilla
# Compiled now, because the file system may be read-only at run time, and each start would compile again.
RUN /opt/venv/bin/python -m compileall -q app

FROM ${BASE}
# Production installs nothing, so the final image contains no pip, neither this one nor the virtual environment's.
RUN rm -rf "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/pip* /usr/local/bin/pip*
COPY --from=build /opt/venv /opt/venv
COPY --from=build /srv/flotilla /srv/flotilla
# What lists and metrics show for the instances of this image: --build-arg VERSION=$(git rev-parse --short HEAD)
ARG VERSION
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/srv/flotilla \
    PYTHONUNBUFFERED=1 \
    FLOTILLA_ENVIRONMENT=production \
    FLOTILLA_HOST=0.0.0.0 \
    FLOTILLA_VERSION=${VERSION}
WORKDIR /srv/flotilla
# A number, because `runAsNonRoot` cannot check a name. This user owns no file and can change nothing in the image.
USER 10001:10001
EXPOSE 8000
# The form without a shell: a shell would not pass SIGTERM to the process.
CMD ["flotilla", "serve"]
