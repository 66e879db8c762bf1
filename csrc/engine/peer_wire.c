#define _GNU_SOURCE
#include "peer_wire.h"

#include "../base/clock.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define UNIX "unix:"
#define BACKLOG 64

/* ---- addresses ---- */

bool peer_is_local(const char *address)
{
    return !strncmp(address, UNIX, strlen(UNIX));
}

/* A name without a file: it goes with its socket. */
static socklen_t local_name(const char *address, struct sockaddr_un *name)
{
    *name = (struct sockaddr_un){.sun_family = AF_UNIX};
    int n = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "llmpy-peer-%s", address + strlen(UNIX));
    size_t most = sizeof name->sun_path - 2, used = n < 0 ? 0 : (size_t)n < most ? (size_t)n : most;
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + used);
}

/* Places at HOST:PORT, to be freed; NULL: there is none. */
static struct addrinfo *find_places(const char *address, bool is_listener)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = is_listener ? AI_PASSIVE : 0}, *places = NULL;
    char host[PEER_ADDRESS];
    const char *colon = strrchr(address, ':');
    if (!colon || colon == address || (size_t)(colon - address) >= sizeof host)
        return NULL;
    bool has_brackets = address[0] == '[' && colon[-1] == ']';
    snprintf(host, sizeof host, "%.*s", (int)(colon - address) - 2 * has_brackets, address + has_brackets);
    return getaddrinfo(host, colon + 1, &hints, &places) ? NULL : places;
}

static int new_socket(int family)
{
    int made = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    if (made >= 0 && family != AF_UNIX)
        setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return made;
}

static bool wait_for(int fd, short events, double until)
{
    struct pollfd one = {.fd = fd, .events = events};
    for (;;) {
        double left = until - seconds_now();
        int n = poll(&one, 1, left <= 0 ? 0 : (int)(left * 1000) + 1);
        if (n >= 0 || errno != EINTR)
            return n > 0;
    }
}

/* ---- listening and connecting ---- */

static int listen_at(int family, const struct sockaddr *name, socklen_t n_name)
{
    int made = new_socket(family), on = 1;
    if (made < 0)
        return -1;
    if (family != AF_UNIX)
        setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (!bind(made, name, n_name) && !listen(made, BACKLOG))
        return made;
    int code = errno;
    close(made);
    errno = code;
    return -1;
}

enum rc peer_listen(const char *address, int *result, struct err *err)
{
    int made = -1;
    errno = EADDRNOTAVAIL;
    if (peer_is_local(address)) {
        struct sockaddr_un name;
        socklen_t n_name = local_name(address, &name);
        made = listen_at(AF_UNIX, (struct sockaddr *)&name, n_name);
    } else {
        struct addrinfo *places = find_places(address, true);
        for (const struct addrinfo *at = places; at && made < 0; at = at->ai_next)
            made = listen_at(at->ai_family, at->ai_addr, at->ai_addrlen);
        int code = errno;
        if (places)
            freeaddrinfo(places);
        errno = code;
    }
    *result = made;
    return made >= 0 ? RC_OK : err_set(err, RC_CONFIG, "cannot listen at '%s': %s", address, strerror(errno));
}

static int connect_to(int family, const struct sockaddr *name, socklen_t n_name, double until)
{
    int made = new_socket(family), code = 0;
    socklen_t n_code = sizeof code;
    if (made < 0)
        return -1;
    bool is_on = !connect(made, name, n_name);
    if (!is_on && errno == EINPROGRESS)
        is_on = wait_for(made, POLLOUT, until) && !getsockopt(made, SOL_SOCKET, SO_ERROR, &code, &n_code) && !code;
    if (is_on)
        return made;
    close(made);
    return -1;
}

int peer_connect(const char *address, double seconds)
{
    double until = seconds_now() + seconds;
    int made = -1;
    if (peer_is_local(address)) {
        struct sockaddr_un name;
        socklen_t n_name = local_name(address, &name);
        return connect_to(AF_UNIX, (struct sockaddr *)&name, n_name, until);
    }
    struct addrinfo *places = find_places(address, false);
    for (const struct addrinfo *at = places; at && made < 0; at = at->ai_next)
        made = connect_to(at->ai_family, at->ai_addr, at->ai_addrlen, until);
    if (places)
        freeaddrinfo(places);
    return made;
}

bool peer_is_own(int fd)
{
    struct ucred other;
    socklen_t n = sizeof other;
    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &n) && other.uid == geteuid();
}

/* ---- bytes ---- */

bool peer_read(int fd, void *bytes, size_t n_bytes, double seconds)
{
    double until = seconds_now() + seconds;
    for (size_t at = 0; at < n_bytes;) {
        ssize_t n = recv(fd, (char *)bytes + at, n_bytes - at, 0);
        if (n > 0)
            at += (size_t)n;
        else if (!n || (errno != EINTR && (errno != EAGAIN || !wait_for(fd, POLLIN, until))))
            return false;
    }
    return true;
}

/* Sends a message piece by piece; a descriptor goes with the first one. */
static bool send_all(int fd, struct msghdr *message, const char *bytes, size_t n_bytes, double seconds)
{
    double until = seconds_now() + seconds;
    for (size_t at = 0; at < n_bytes;) {
        struct iovec piece = {(char *)bytes + at, n_bytes - at};
        message->msg_iov = &piece;
        message->msg_iovlen = 1;
        ssize_t n = sendmsg(fd, message, MSG_NOSIGNAL);
        if (n >= 0) {
            at += (size_t)n;
            message->msg_control = NULL;
            message->msg_controllen = 0;
        } else if (errno != EINTR && (errno != EAGAIN || !wait_for(fd, POLLOUT, until))) {
            return false;
        }
    }
    return true;
}

bool peer_write(int fd, const void *bytes, size_t n_bytes, double seconds)
{
    struct msghdr message = {0};
    return send_all(fd, &message, bytes, n_bytes, seconds);
}

union with_descriptor {
    struct cmsghdr head;           /* aligns the bytes */
    char bytes[CMSG_SPACE(sizeof(int))];
};

bool peer_write_welcome(int fd, const struct peer_welcome *welcome, int descriptor, double seconds)
{
    union with_descriptor control = {{0}};
    struct msghdr message = {0};
    if (descriptor >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        *head = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof descriptor), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
    }
    return send_all(fd, &message, (const char *)welcome, sizeof *welcome, seconds);
}

bool peer_read_welcome(int fd, struct peer_welcome *welcome, int *descriptor, double seconds)
{
    double until = seconds_now() + seconds;
    union with_descriptor control = {{0}};
    struct iovec piece = {welcome, sizeof *welcome};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    ssize_t n;
    *descriptor = -1;
    while ((n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC)) < 0 && (errno == EINTR || errno == EAGAIN))
        if (!wait_for(fd, POLLIN, until))
            return false;
    if (n <= 0)
        return false;
    const struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS && head->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(descriptor, CMSG_DATA(head), sizeof *descriptor);
    return peer_read(fd, (char *)welcome + n, sizeof *welcome - (size_t)n, until - seconds_now());
}
