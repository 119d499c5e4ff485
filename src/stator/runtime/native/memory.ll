; Memory that is kept between calls, and tensors on it: what every program shares, with Python or
; without.
;
; An arena is a block: a mapping of pages of its own.  The 64 bytes before what is handed out are its
; header.  Blocks that nobody uses wait in a list; what outputs have is in pool.ll.  All of it is
; guarded by one mutex, which a fork takes (see prelude.py), so that a child finds it free and the
; lists whole.

%block = type { ptr, i64, i64 }  ; next in the list, bytes, start of the mapping

@mutex = internal global [64 x i8] zeroinitializer, align 64
@arenas = internal global ptr null
@blocks = internal global i64 0  ; made so far

declare i32 @pthread_mutex_lock(ptr) nonlazybind
declare i32 @pthread_mutex_unlock(ptr) nonlazybind
declare ptr @mmap(ptr, i64, i32, i32, i32, i64) nonlazybind
declare i32 @munmap(ptr, i64) nonlazybind
declare i32 @madvise(ptr, i64, i32) nonlazybind
declare i32 @torch_from_blob(ptr, i64, ptr, ptr, i64, i32, i32, i32, ptr, i32, ptr, i64, ptr, ptr) nonlazybind
declare i32 @aoti_torch_empty_strided(i64, ptr, ptr, i32, i32, i32, ptr) nonlazybind
declare i32 @aoti_torch_delete_tensor_object(ptr) nonlazybind
declare i32 @aoti_torch_get_strides(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_dim(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_dtype(ptr, ptr) nonlazybind
declare i32 @torch_get_const_data_ptr(ptr, ptr) nonlazybind
declare i32 @torch_get_mutable_data_ptr(ptr, ptr) nonlazybind

; --- pages ---

; A new block; null if the system has no memory left.  What it hands out begins, from 2 MiB on, on a
; border of 2 MiB, and asks for pages of that size: one fault instead of 512.  The header is in the
; page before it, then.  Blocks are shifted against each other by some cache lines: tensors that all
; began at the same place of a page would fight for the same lines of the cache.
define internal ptr @map_block(i64 %bytes) {
  %large = icmp uge i64 %bytes, 2097152
  %align = select i1 %large, i64 2097152, i64 4096
  %turn = atomicrmw add ptr @blocks, i64 1 monotonic
  %steps = mul i64 %turn, 320
  %shift = and i64 %steps, 4032             ; a multiple of 64 below 4096
  %fixed = select i1 %large, i64 4096, i64 64
  %head = add i64 %fixed, %shift
  %needed = add i64 %bytes, %head
  %raised = add i64 %needed, 4095
  %total = and i64 %raised, -4096
  %more = select i1 %large, i64 %align, i64 0
  %asked = add i64 %total, %more
  %got = call ptr @mmap(ptr null, i64 %asked, i32 {PROTECTION}, i32 {FLAGS}, i32 -1, i64 0)
  %address = ptrtoint ptr %got to i64
  %failed = icmp eq i64 %address, -1
  br i1 %failed, label %none, label %some
none:
  ret ptr null
some:
  br i1 %large, label %trim, label %done
trim:
  %behind_head = add i64 %address, 4096
  %lifted = add i64 %behind_head, 2097151
  %border = and i64 %lifted, -2097152
  %start = sub i64 %border, 4096
  %before = sub i64 %start, %address
  %has_before = icmp ne i64 %before, 0
  br i1 %has_before, label %drop_before, label %behind
drop_before:
  call i32 @munmap(ptr %got, i64 %before)
  br label %behind
behind:
  %end = add i64 %start, %total
  %got_end = add i64 %address, %asked
  %after = sub i64 %got_end, %end
  %has_after = icmp ne i64 %after, 0
  br i1 %has_after, label %drop_after, label %ask
drop_after:
  %tail = inttoptr i64 %end to ptr
  call i32 @munmap(ptr %tail, i64 %after)
  br label %ask
ask:
  %data = inttoptr i64 %border to ptr
  %length = sub i64 %total, 4096
  call i32 @madvise(ptr %data, i64 %length, i32 {HUGE})
  br label %done
done:
  %base = phi i64 [ %address, %some ], [ %start, %ask ]
  %lead = sub i64 %head, 64
  %block_at = add i64 %base, %lead
  %block = inttoptr i64 %block_at to ptr
  %bytes_at = getelementptr %block, ptr %block, i64 0, i32 1
  store i64 %total, ptr %bytes_at
  %base_at = getelementptr %block, ptr %block, i64 0, i32 2
  store i64 %base, ptr %base_at
  ret ptr %block
}

; Give a block back to the system.
define internal void @unmap_block(ptr %block) {
  %bytes_at = getelementptr %block, ptr %block, i64 0, i32 1
  %bytes = load i64, ptr %bytes_at
  %base_at = getelementptr %block, ptr %block, i64 0, i32 2
  %base = load ptr, ptr %base_at
  call i32 @munmap(ptr %base, i64 %bytes)
  ret void
}

; Give a list of blocks back to the system; how many bytes that was.
define internal i64 @unmap_list(ptr %first) {
entry:
  br label %head
head:
  %block = phi ptr [ %first, %entry ], [ %next, %body ]
  %sum = phi i64 [ 0, %entry ], [ %more, %body ]
  %end = icmp eq ptr %block, null
  br i1 %end, label %done, label %body
body:
  %next_at = getelementptr %block, ptr %block, i64 0, i32 0
  %next = load ptr, ptr %next_at
  %bytes_at = getelementptr %block, ptr %block, i64 0, i32 1
  %bytes = load i64, ptr %bytes_at
  %more = add i64 %sum, %bytes
  call void @unmap_block(ptr %block)
  br label %head
done:
  ret i64 %sum
}

; --- arenas: what lives inside of one call ---

; The arena that was given back last; a larger one in its place if it is too small.
define ptr @stator_arena_take(i64 %bytes) {
entry:
  call i32 @pthread_mutex_lock(ptr @mutex)
  %first = load ptr, ptr @arenas
  %none = icmp eq ptr %first, null
  br i1 %none, label %without, label %some
some:
  %next = load ptr, ptr %first
  store ptr %next, ptr @arenas
  call i32 @pthread_mutex_unlock(ptr @mutex)
  %bytes_at = getelementptr %block, ptr %first, i64 0, i32 1
  %total = load i64, ptr %bytes_at
  %base_at = getelementptr %block, ptr %first, i64 0, i32 2
  %base = load i64, ptr %base_at
  %block_at = ptrtoint ptr %first to i64
  %before = sub i64 %block_at, %base
  %head = add i64 %before, 64
  %needed = add i64 %bytes, %head
  %enough = icmp uge i64 %total, %needed
  br i1 %enough, label %done, label %small
small:
  call void @unmap_block(ptr %first)
  br label %map
without:
  call i32 @pthread_mutex_unlock(ptr @mutex)
  br label %map
map:
  %mapped = call ptr @map_block(i64 %bytes)
  %missing = icmp eq ptr %mapped, null
  br i1 %missing, label %fail, label %done
fail:
  ret ptr null
done:
  %block = phi ptr [ %first, %some ], [ %mapped, %map ]
  %data = getelementptr i8, ptr %block, i64 64
  ret ptr %data
}

define void @stator_arena_give(ptr %data) {
  %block = getelementptr i8, ptr %data, i64 -64
  call i32 @pthread_mutex_lock(ptr @mutex)
  %first = load ptr, ptr @arenas
  store ptr %first, ptr %block
  store ptr %block, ptr @arenas
  call i32 @pthread_mutex_unlock(ptr @mutex)
  ret void
}

; --- for those who ask ---

; Give everything that waits back to the system; how many bytes that was.
define i64 @stator_trim() {
  call i32 @pthread_mutex_lock(ptr @mutex)
  %pool = call i64 @release_pages(i64 -1)
  %used = load i64, ptr @used_bytes
  store i64 %used, ptr @peak_bytes
  %first = load ptr, ptr @arenas
  store ptr null, ptr @arenas
  %arena = call i64 @unmap_list(ptr %first)
  call i32 @pthread_mutex_unlock(ptr @mutex)
  %sum = add i64 %pool, %arena
  ret i64 %sum
}

; How many bytes may wait beyond what was used at once.
define void @stator_set_spare(i64 %bytes) {
  call i32 @pthread_mutex_lock(ptr @mutex)
  store i64 %bytes, ptr @spare
  call i32 @pthread_mutex_unlock(ptr @mutex)
  ret void
}

; Bytes of the pool that are in use, that wait, bytes of arenas that wait, and the most in use.
define void @stator_memory(ptr %counts) {
entry:
  call i32 @pthread_mutex_lock(ptr @mutex)
  %used = load i64, ptr @used_bytes
  %idle = load i64, ptr @idle_bytes
  %first = load ptr, ptr @arenas
  br label %head
head:
  %block = phi ptr [ %first, %entry ], [ %next, %body ]
  %sum = phi i64 [ 0, %entry ], [ %more, %body ]
  %end = icmp eq ptr %block, null
  br i1 %end, label %done, label %body
body:
  %next = load ptr, ptr %block
  %bytes_at = getelementptr %block, ptr %block, i64 0, i32 1
  %bytes = load i64, ptr %bytes_at
  %more = add i64 %sum, %bytes
  br label %head
done:
  call i32 @pthread_mutex_unlock(ptr @mutex)
  %second = getelementptr i64, ptr %counts, i64 1
  %third = getelementptr i64, ptr %counts, i64 2
  %fourth = getelementptr i64, ptr %counts, i64 3
  %most = load i64, ptr @peak_bytes
  store i64 %used, ptr %counts
  store i64 %idle, ptr %second
  store i64 %sum, ptr %third
  store i64 %most, ptr %fourth
  ret void
}

define void @stator_before_fork() {
  call i32 @pthread_mutex_lock(ptr @mutex)
  ret void
}

define void @stator_after_fork() {
  call i32 @pthread_mutex_unlock(ptr @mutex)
  ret void
}

; --- tensors ---

; A tensor that the caller keeps: its handle goes to %slot, the address of its data to %data; the
; result is 0, or 1 on failure.  Small ones are torch's own: its allocator is as quick, and wastes no
; page.
define i32 @stator_new_tensor(i64 %bytes, i64 %dims, ptr %size, ptr %stride, i32 %dtype, ptr %slot, ptr %data) {
entry:
  %small = icmp slt i64 %bytes, 65536
  br i1 %small, label %ordinary, label %pooled
ordinary:
  %code = call i32 @aoti_torch_empty_strided(i64 %dims, ptr %size, ptr %stride, i32 %dtype, i32 0, i32 0, ptr %slot)
  %ok = icmp eq i32 %code, 0
  br i1 %ok, label %look, label %fail
look:
  %own = load ptr, ptr %slot
  %looked = call i32 @torch_get_mutable_data_ptr(ptr %own, ptr %data)
  ret i32 %looked
pooled:
  %taken = call ptr @stator_pool_take(i64 %bytes)
  store ptr %taken, ptr %data
  %none = icmp eq ptr %taken, null
  br i1 %none, label %fail, label %wrap
wrap:
  %second = call i32 @torch_from_blob(ptr %taken, i64 %dims, ptr %size, ptr %stride, i64 0, i32 %dtype, i32 0, i32 -1, ptr %slot, i32 0, ptr null, i64 0, ptr @stator_pool_give, ptr null)
  %wrapped = icmp eq i32 %second, 0
  br i1 %wrapped, label %done, label %undo
done:
  ret i32 0
undo:
  call void @stator_pool_give(ptr %taken, ptr null)
  br label %fail
fail:
  ret i32 1
}

; The same on another device, where torch's allocator is the pool.
define i32 @stator_new_on(i64 %dims, ptr %size, ptr %stride, i32 %dtype, i32 %kind, i32 %index, ptr %slot, ptr %data) {
  %code = call i32 @aoti_torch_empty_strided(i64 %dims, ptr %size, ptr %stride, i32 %dtype, i32 %kind, i32 %index, ptr %slot)
  %ok = icmp eq i32 %code, 0
  br i1 %ok, label %look, label %fail
look:
  %own = load ptr, ptr %slot
  %looked = call i32 @torch_get_mutable_data_ptr(ptr %own, ptr %data)
  ret i32 %looked
fail:
  ret i32 1
}

; The address of a tensor's data, if it lies as a kernel was compiled for: 0, or 1 if it does not.
define i32 @stator_data(ptr %tensor, i32 %dtype, i64 %dims, ptr %stride, i32 %written, ptr %data) {
entry:
  %word = alloca i64
  %list_at = alloca ptr
  call i32 @aoti_torch_get_dtype(ptr %tensor, ptr %word)
  %its_dtype = load i32, ptr %word
  %same_dtype = icmp eq i32 %its_dtype, %dtype
  br i1 %same_dtype, label %rank, label %other
rank:
  call i32 @aoti_torch_get_dim(ptr %tensor, ptr %word)
  %its_dims = load i64, ptr %word
  %same_dims = icmp eq i64 %its_dims, %dims
  br i1 %same_dims, label %strides, label %other
strides:
  call i32 @aoti_torch_get_strides(ptr %tensor, ptr %list_at)
  %list = load ptr, ptr %list_at
  br label %head
head:
  %i = phi i64 [ 0, %strides ], [ %j, %body ]
  %more = icmp slt i64 %i, %dims
  br i1 %more, label %body, label %take
body:
  %want_at = getelementptr i64, ptr %stride, i64 %i
  %have_at = getelementptr i64, ptr %list, i64 %i
  %want = load i64, ptr %want_at
  %have = load i64, ptr %have_at
  %j = add i64 %i, 1
  %same = icmp eq i64 %want, %have
  br i1 %same, label %head, label %other
take:
  %writes = icmp ne i32 %written, 0
  br i1 %writes, label %mutable, label %constant
mutable:
  %first = call i32 @torch_get_mutable_data_ptr(ptr %tensor, ptr %data)
  ret i32 %first
constant:
  %second = call i32 @torch_get_const_data_ptr(ptr %tensor, ptr %data)
  ret i32 %second
other:
  ret i32 1
}

; --- what a program holds ---

define void @stator_drop_handle(ptr %slot) {
  %handle = load ptr, ptr %slot
  store ptr null, ptr %slot
  %none = icmp eq ptr %handle, null
  br i1 %none, label %done, label %drop
drop:
  call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  br label %done
done:
  ret void
}

; Let go of every tensor that a failed call holds.
define void @stator_drop_handles(ptr %handles, i64 %count) {
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %done
body:
  %at = getelementptr ptr, ptr %handles, i64 %i
  call void @stator_drop_handle(ptr %at)
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}
