# One image for every part of a deployment: it serves by default, and `flotilla migrate`, `flotilla list` and the rest
# are commands of the same image.
#
# The project runs from its source: the migrations lie beside `app/`, where app/fleet/db/migrations.py looks for them.
# So there is nothing to build, and no build tool to pin; the command `flotilla` is three lines of Python.

# Named once. For builds that can be repeated to the byte, give it a digest: --build-arg BASE=python@sha256:…
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
RUN python -m venv /opt/venv
COPY requirements.lock /tmp/
# Nothing is installed that the lock has no hash for, and nothing that would run code to be built.
RUN /opt/venv/bin/pip install --no-cache-dir --require-hashes --only-binary=:all: --requirement /tmp/requirements.lock \
 && /opt/venv/bin/pip uninstall --yes pip
# Without a shell around it, so that Python itself is process 1 and has the signals.
RUN printf '#!/opt/venv/bin/python\nfrom app.fleet.cli import main\nmain()\n' > /opt/venv/bin/flotilla \
 && chmod 755 /opt/venv/bin/flotilla

COPY alembic.ini /srv/flotilla/
COPY alembic /srv/flotilla/alembic
COPY app /srv/flotilla/app
WORKDIR /srv/flotilla
# Compiled now: at run time the file system may be read-only, and each start would compile again.
RUN /opt/venv/bin/python -m compileall -q app

FROM ${BASE}
# What runs in production installs nothing: neither this pip nor the virtual environment's is in the final image.
RUN rm -rf "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/pip* /usr/local/bin/pip*
COPY --from=build /opt/venv /opt/venv
COPY --from=build /srv/flotilla /srv/flotilla
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/srv/flotilla \
    PYTHONUNBUFFERED=1 \
    FLOTILLA_ENVIRONMENT=production \
    FLOTILLA_HOST=0.0.0.0
WORKDIR /srv/flotilla
# A number, because `runAsNonRoot` cannot judge a name. It owns no file: nothing in the image can be changed by it.
USER 10001:10001
EXPOSE 8000
# The form without a shell, which would not pass SIGTERM on.
CMD ["flotilla", "serve"]
