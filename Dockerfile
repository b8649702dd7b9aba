# docker build -t open_clip_mdc . && docker run --shm-size 2g -p 7860:7860 open_clip_mdc          (the app)
# docker run --shm-size 2g -v $PWD:/work open_clip_mdc caption photo.jpg                          (any command)
# With a GPU leave out the first RUN, and give --gpus all. Data workers need --shm-size: Docker's 64 MB are too few.
FROM python:3.12-slim
RUN pip install --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/cpu
COPY . /src
RUN pip install --no-cache-dir '/src[app]'
WORKDIR /work
ENTRYPOINT ["open_clip_mdc"]
CMD ["app", "--host", "0.0.0.0"]
