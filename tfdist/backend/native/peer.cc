#include "peer.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace tfdist {
namespace {

using tensorflow::Tensor;

constexpr uint32_t kMagic = 0x74666434;  // "tfd4"
constexpr int kMaxDims = 32;
constexpr uint32_t kMaxTag = 1 << 12;
// More than a process runs at a time.
constexpr size_t kMaxSteps = 64;

size_t ContentBytes(const Tensor& tensor) { return tensor.tensor_data().size(); }

}  // namespace

absl::Status Gone(int rank, const std::string& why) {
  return absl::AbortedError("The connection to rank " + std::to_string(rank) +
                                " has ended: " + why);
}

// What stands before each message; then follow the sizes of the dims, the tag and the content.
// Both ends run the same binary on machines of one byte order.
struct Peer::Header {
  uint32_t magic;
  int32_t dtype;
  int32_t dims;
  uint32_t tag_bytes;
  uint64_t content_bytes;
  int64_t run, step;
};

struct Peer::Message {
  Message(const std::string& tag, const Moment& now, const Tensor& content)
      : tensor(content), body(content.tensor_data()) {
    const int dims = content.dims();
    const Header header{kMagic,  static_cast<int32_t>(content.dtype()),
                        dims,    static_cast<uint32_t>(tag.size()),
                        body.size(), now.run, now.step};
    head.append(reinterpret_cast<const char*>(&header), sizeof(header));
    for (int i = 0; i < dims; ++i) {
      const int64_t size = content.dim_size(i);
      head.append(reinterpret_cast<const char*>(&size), sizeof(size));
    }
    head += tag;
    left = head.size() + body.size();
  }

  std::string head;
  Tensor tensor;  // Holds what `body` points to.
  absl::string_view body;
  size_t left;
};

Peer::Peer(int rank, int socket) : rank_(rank), socket_(socket), buffer_(1 << 16) {}

Peer::~Peer() { close(socket_); }

void Peer::Start() {
  auto self = shared_from_this();
  // Signals are for the main thread, which Python waits in.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([self] { self->ReadAll(); }).detach();
  std::thread([self] { self->WriteAll(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Peer::BeginRun(int64_t run) {
  {
    std::lock_guard<std::mutex> lock(step_mutex_);
    run_ = run;
    num_steps_ = 0;
    steps_.clear();
  }
  std::vector<Transport::Arrival> late;
  {
    std::lock_guard<std::mutex> lock(read_mutex_);
    for (auto it = mailboxes_.begin(); it != mailboxes_.end();) {
      Mailbox& box = it->second;
      while (!box.arrived.empty() && box.arrived.front().sent.run < run) box.arrived.pop_front();
      while (!box.waiting.empty() && box.waiting.front().moment.run < run) {
        late.push_back(std::move(box.waiting.front().arrival));
        box.waiting.pop_front();
      }
      // Tags of graphs that are gone would stay for ever.
      it = box.arrived.empty() && box.waiting.empty() ? mailboxes_.erase(it) : std::next(it);
    }
  }
  for (auto& arrival : late) {
    arrival(absl::CancelledError("The step was left while it waited for rank " +
                                 std::to_string(rank_)),
            Tensor());
  }
}

Peer::Moment Peer::Now(int64_t step_id) {
  std::lock_guard<std::mutex> lock(step_mutex_);
  if (step_id == 0) return {run_, 0};
  for (auto it = steps_.rbegin(); it != steps_.rend(); ++it) {
    if (it->first == step_id) return {run_, it->second};
  }
  steps_.emplace_back(step_id, ++num_steps_);
  if (steps_.size() > kMaxSteps) steps_.pop_front();
  return {run_, num_steps_};
}

bool Peer::IsStale(const Moment& sent, const Moment& wanted) {
  return sent.run < wanted.run || (sent.run == wanted.run && sent.step < wanted.step);
}

absl::Status Peer::Matches(const Moment& sent, const Moment& wanted) const {
  if (sent.run == wanted.run && sent.step == wanted.step) return absl::OkStatus();
  const bool other_run = sent.run != wanted.run;
  return absl::FailedPreconditionError(
      "The ranks are in different steps: rank " + std::to_string(rank_) + " is in " +
      (other_run ? "call " + std::to_string(sent.run) + " of fit, evaluate or predict"
                 : "step " + std::to_string(sent.step)) +
      ", this rank in " + std::to_string(other_run ? wanted.run : wanted.step) +
      ". A step must end in the same way on all ranks: an exception that one rank catches has to "
      "reach the others");
}

absl::Status Peer::Send(const Call& call, const Tensor& tensor) {
  const Moment now = Now(call.step_id);
  std::lock_guard<std::mutex> lock(write_mutex_);
  if (!write_status_.ok()) return write_status_;
  sent_ += ContentBytes(tensor);
  write_status_ = Post(Message(call.tag, now, tensor));
  return write_status_;
}

int64_t Peer::Receive(const Call& call, Transport::Arrival arrival) {
  const Moment now = Now(call.step_id);
  Tensor tensor;
  absl::Status status;
  {
    std::lock_guard<std::mutex> lock(read_mutex_);
    Mailbox& box = mailboxes_[call.tag];
    while (!box.arrived.empty() && IsStale(box.arrived.front().sent, now)) box.arrived.pop_front();
    if (!box.arrived.empty()) {
      status = Matches(box.arrived.front().sent, now);
      if (status.ok()) {
        tensor = std::move(box.arrived.front().tensor);
        box.arrived.pop_front();
      }
    } else if (!read_status_.ok()) {
      status = read_status_;
    } else {
      const int64_t number = ++last_number_;
      box.waiting.push_back({number, now, std::move(arrival)});
      return number;
    }
  }
  arrival(status, tensor);
  return 0;
}

void Peer::Abandon(const std::string& tag, int64_t number) {
  Transport::Arrival arrival;
  {
    std::lock_guard<std::mutex> lock(read_mutex_);
    auto& waiting = mailboxes_[tag].waiting;
    auto found = std::find_if(waiting.begin(), waiting.end(),
                              [&](const auto& entry) { return entry.number == number; });
    if (found == waiting.end()) return;
    arrival = std::move(found->arrival);
    waiting.erase(found);
  }
  arrival(absl::CancelledError("The step was cancelled while it waited for rank " +
                               std::to_string(rank_)),
          Tensor());
}

void Peer::Close() {
  {
    std::lock_guard<std::mutex> lock(write_mutex_);
    closed_ = true;
    if (write_status_.ok()) write_status_ = Gone(rank_, "this process has closed it");
  }
  write_ready_.notify_all();
  write_done_.notify_all();
  shutdown(socket_, SHUT_RDWR);
}

bool Peer::Flush(std::chrono::steady_clock::time_point until) {
  std::unique_lock<std::mutex> lock(write_mutex_);
  return write_done_.wait_until(lock, until,
                                [&] { return outbox_.empty() || !write_status_.ok(); }) &&
         write_status_.ok();
}

absl::Status Peer::Post(Message message) {
  const bool idle = outbox_.empty();
  outbox_.push_back(std::move(message));
  // A small message leaves from here: no other thread need wake up.
  if (idle) {
    absl::Status status = WriteSome(&outbox_.front(), MSG_DONTWAIT);
    if (!status.ok()) return status;
    if (outbox_.front().left == 0) outbox_.pop_front();
  }
  if (!outbox_.empty()) write_ready_.notify_all();
  return absl::OkStatus();
}

// Writes until the message is out or, with MSG_DONTWAIT, the socket is full.
absl::Status Peer::WriteSome(Message* message, int flags) {
  const std::string& head = message->head;
  const absl::string_view body = message->body;
  while (message->left > 0) {
    const size_t done = head.size() + body.size() - message->left;
    iovec parts[2];
    int count = 0;
    if (done < head.size()) {
      parts[count++] = {const_cast<char*>(head.data()) + done, head.size() - done};
    }
    const size_t begin = done > head.size() ? done - head.size() : 0;
    if (begin < body.size()) {
      parts[count++] = {const_cast<char*>(body.data()) + begin, body.size() - begin};
    }
    msghdr call{};
    call.msg_iov = parts;
    call.msg_iovlen = count;
    const ssize_t written = sendmsg(socket_, &call, flags | MSG_NOSIGNAL);
    if (written >= 0) {
      message->left -= written;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return absl::OkStatus();
    } else if (errno != EINTR) {
      return Gone(rank_, strerror(errno));
    }
  }
  return absl::OkStatus();
}

void Peer::WriteAll() {
  std::unique_lock<std::mutex> lock(write_mutex_);
  while (true) {
    write_ready_.wait(lock, [&] { return closed_ || (!outbox_.empty() && write_status_.ok()); });
    if (closed_) return;
    // References to the elements of a deque stay good while others are added behind them, and
    // nobody else takes one away while the box is not empty.
    Message& message = outbox_.front();
    lock.unlock();
    absl::Status status = WriteSome(&message, 0);
    lock.lock();
    if (!status.ok()) write_status_ = status;
    outbox_.pop_front();
    if (outbox_.empty() || !status.ok()) write_done_.notify_all();
  }
}

void Peer::ReadAll() {
  absl::Status status;
  while (status.ok()) status = ReadOne();
  std::vector<Transport::Arrival> left;
  {
    std::lock_guard<std::mutex> lock(read_mutex_);
    read_status_ = status;
    for (auto& [tag, box] : mailboxes_) {
      for (auto& waiting : box.waiting) left.push_back(std::move(waiting.arrival));
      box.waiting.clear();
    }
  }
  for (auto& arrival : left) arrival(status, Tensor());
  {
    std::lock_guard<std::mutex> lock(write_mutex_);
    if (write_status_.ok()) write_status_ = status;
  }
  write_done_.notify_all();
}

absl::Status Peer::ReadOne() {
  Header header;
  absl::Status status = Read(&header, sizeof(header));
  if (!status.ok()) return status;
  if (header.magic != kMagic || header.dims < 0 || header.dims > kMaxDims ||
      header.tag_bytes > kMaxTag) {
    return Gone(rank_, "it sent what is no message of this version of tfdist");
  }
  std::vector<int64_t> sizes(header.dims);
  std::string tag(header.tag_bytes, '\0');
  status = Read(sizes.data(), sizes.size() * sizeof(int64_t));
  if (status.ok()) status = Read(tag.data(), tag.size());
  if (!status.ok()) return status;
  tensorflow::TensorShape shape;
  status = tensorflow::TensorShape::BuildTensorShape(sizes, &shape);
  if (!status.ok()) return status;
  Tensor tensor(tensorflow::cpu_allocator(), static_cast<tensorflow::DataType>(header.dtype),
                shape);
  if (!tensor.IsInitialized() && shape.num_elements() > 0) {
    return absl::ResourceExhaustedError("No memory for a message of " +
                                        std::to_string(header.content_bytes) + " bytes");
  }
  if (ContentBytes(tensor) != header.content_bytes) {
    return Gone(rank_, "a message is not as long as its shape says");
  }
  char* target = const_cast<char*>(tensor.tensor_data().data());
  status = Read(target, header.content_bytes);
  if (!status.ok()) return status;
  received_ += header.content_bytes;
  Deliver(tag, {header.run, header.step}, std::move(tensor));
  return absl::OkStatus();
}

void Peer::Deliver(const std::string& tag, const Moment& sent, Tensor tensor) {
  Transport::Arrival arrival;
  absl::Status status;
  {
    std::lock_guard<std::mutex> lock(read_mutex_);
    Mailbox& box = mailboxes_[tag];
    if (box.waiting.empty()) {
      box.arrived.push_back({sent, std::move(tensor)});
      return;
    }
    const Moment wanted = box.waiting.front().moment;
    if (IsStale(sent, wanted)) return;
    status = Matches(sent, wanted);
    arrival = std::move(box.waiting.front().arrival);
    box.waiting.pop_front();
    if (!status.ok()) {
      box.arrived.push_back({sent, std::move(tensor)});
      tensor = Tensor();
    }
  }
  arrival(status, std::move(tensor));
}

// Small reads go through a buffer, so that a small message costs one call of the kernel.
absl::Status Peer::Read(void* target, size_t bytes) {
  char* to = static_cast<char*>(target);
  while (bytes > 0) {
    if (begin_ == end_) {
      const bool direct = bytes >= buffer_.size();
      const ssize_t got =
          recv(socket_, direct ? to : buffer_.data(), direct ? bytes : buffer_.size(), 0);
      if (got == 0) return Gone(rank_, "the process has ended or left");
      if (got < 0) {
        if (errno == EINTR) continue;
        return Gone(rank_, strerror(errno));
      }
      if (direct) {
        to += got;
        bytes -= got;
        continue;
      }
      begin_ = 0;
      end_ = got;
    }
    const size_t part = std::min(bytes, end_ - begin_);
    memcpy(to, buffer_.data() + begin_, part);
    begin_ += part;
    to += part;
    bytes -= part;
  }
  return absl::OkStatus();
}

}  // namespace tfdist
