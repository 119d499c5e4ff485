; The pool: outputs and saved values, which live as long as somebody refers to them.
;
; One stretch of addresses is set aside and divided into rooms, used and free ones, without gaps.
; The 64 bytes before what is handed out are a room's header.  A free room joins its free neighbours
; at once; a request takes the smallest free room that holds it, and leaves the rest of it free; if
; there is none, the stretch grows at its end.  So freed pages are used again, whatever size comes
; next, and a step that runs again finds all its pages there.  Behind the last room stands a header
; without a room, marked as used.

%room = type { i64, ptr, i64, i64, ptr, ptr }  ; see below
; 0: bytes, with the header; 1: the room before it; 2: whether it is free, and if so
; 3: how many of its bytes are held, 4 and 5: the next and the previous free one

@free_rooms = internal global ptr null
@border = internal global ptr null  ; the header behind the last room; null: nothing is set aside yet
@grown = internal global i64 0  ; up to here the stretch may be read and written
@stretch_end = internal global i64 0
@idle_bytes = internal global i64 0  ; held by free rooms
@used_bytes = internal global i64 0
@peak_bytes = internal global i64 0  ; used at once, since the last trim
@spare = internal global i64 16777216  ; bytes that may wait beyond what was used at once

declare i32 @mprotect(ptr, i64, i32) nonlazybind
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @llvm.usub.sat.i64(i64, i64)
declare i64 @llvm.umin.i64(i64, i64)

; --- the list of free rooms ---

define internal void @link_room(ptr %room) {
  %first = load ptr, ptr @free_rooms
  %free_at = getelementptr %room, ptr %room, i64 0, i32 2
  store i64 1, ptr %free_at
  %next_at = getelementptr %room, ptr %room, i64 0, i32 4
  store ptr %first, ptr %next_at
  %previous_at = getelementptr %room, ptr %room, i64 0, i32 5
  store ptr null, ptr %previous_at
  store ptr %room, ptr @free_rooms
  %none = icmp eq ptr %first, null
  br i1 %none, label %done, label %tell
tell:
  %its_at = getelementptr %room, ptr %first, i64 0, i32 5
  store ptr %room, ptr %its_at
  br label %done
done:
  ret void
}

define internal void @unlink_room(ptr %room) {
entry:
  %free_at = getelementptr %room, ptr %room, i64 0, i32 2
  store i64 0, ptr %free_at
  %next_at = getelementptr %room, ptr %room, i64 0, i32 4
  %next = load ptr, ptr %next_at
  %previous_at = getelementptr %room, ptr %room, i64 0, i32 5
  %previous = load ptr, ptr %previous_at
  %is_first = icmp eq ptr %previous, null
  %others_at = getelementptr %room, ptr %previous, i64 0, i32 4
  %from = select i1 %is_first, ptr @free_rooms, ptr %others_at
  store ptr %next, ptr %from
  %is_last = icmp eq ptr %next, null
  br i1 %is_last, label %done, label %tell
tell:
  %its_at = getelementptr %room, ptr %next, i64 0, i32 5
  store ptr %previous, ptr %its_at
  br label %done
done:
  ret void
}

; The smallest free room of at least so many bytes; null: none.
define internal ptr @best_room(i64 %needed) {
entry:
  %first = load ptr, ptr @free_rooms
  br label %head
head:
  %room = phi ptr [ %first, %entry ], [ %next, %body ]
  %best = phi ptr [ null, %entry ], [ %better, %body ]
  %least = phi i64 [ -1, %entry ], [ %less, %body ]
  %end = icmp eq ptr %room, null
  br i1 %end, label %done, label %body
body:
  %bytes = load i64, ptr %room
  %next_at = getelementptr %room, ptr %room, i64 0, i32 4
  %next = load ptr, ptr %next_at
  %fits = icmp uge i64 %bytes, %needed
  %smaller = icmp ult i64 %bytes, %least
  %good = and i1 %fits, %smaller
  %better = select i1 %good, ptr %room, ptr %best
  %less = select i1 %good, i64 %bytes, i64 %least
  br label %head
done:
  ret ptr %best
}

; --- pages ---

; Give the pages of free rooms back to the system until so many bytes are, or all; how many it were.
; The mutex is held.
define internal i64 @release_pages(i64 %wanted) {
entry:
  %first = load ptr, ptr @free_rooms
  br label %head
head:
  %room = phi ptr [ %first, %entry ], [ %next, %after ]
  %sum = phi i64 [ 0, %entry ], [ %more, %after ]
  %end = icmp eq ptr %room, null
  %enough = icmp uge i64 %sum, %wanted
  %stop = or i1 %end, %enough
  br i1 %stop, label %done, label %body
body:
  %next_at = getelementptr %room, ptr %room, i64 0, i32 4
  %next = load ptr, ptr %next_at
  %held_at = getelementptr %room, ptr %room, i64 0, i32 3
  %held = load i64, ptr %held_at
  %more = add i64 %sum, %held
  store i64 0, ptr %held_at
  %none = icmp eq i64 %held, 0
  br i1 %none, label %after, label %find
find:
  %bytes = load i64, ptr %room
  %address = ptrtoint ptr %room to i64
  %behind = add i64 %address, 4159          ; the header stays, in the page that it is in
  %from = and i64 %behind, -4096
  %room_end = add i64 %address, %bytes
  %to = and i64 %room_end, -4096
  %length = sub i64 %to, %from
  %pages = icmp sgt i64 %length, 0
  br i1 %pages, label %give, label %after
give:
  %start = inttoptr i64 %from to ptr
  call i32 @madvise(ptr %start, i64 %length, i32 {DONT_NEED})
  br label %after
after:
  br label %head
done:
  %idle = load i64, ptr @idle_bytes
  %less = sub i64 %idle, %sum
  store i64 %less, ptr @idle_bytes
  ret i64 %sum
}

; Set a stretch of addresses aside, for at least so many bytes: 64 GiB, or what the system lets us.
; Not a page of it is there before it is used.  Whether it could be done.
define internal i1 @set_aside(i64 %needed) {
entry:
  %with_border = add i64 %needed, 4194304
  %wish = call i64 @llvm.umax.i64(i64 %with_border, i64 68719476736)
  br label %try
try:
  %size = phi i64 [ %wish, %entry ], [ %half, %less ]
  %got = call ptr @mmap(ptr null, i64 %size, i32 0, i32 {RESERVING}, i32 -1, i64 0)
  %address = ptrtoint ptr %got to i64
  %failed = icmp eq i64 %address, -1
  br i1 %failed, label %less, label %some
less:
  %half = lshr i64 %size, 1
  %too_small = icmp ult i64 %half, %with_border
  br i1 %too_small, label %fail, label %try
fail:
  ret i1 false
some:
  call i32 @madvise(ptr %got, i64 %size, i32 {HUGE})
  %lifted = add i64 %address, 2097151
  %start = and i64 %lifted, -2097152
  %end = add i64 %address, %size
  %first = inttoptr i64 %start to ptr
  %opened = call i32 @mprotect(ptr %first, i64 2097152, i32 {PROTECTION})
  %closed = icmp ne i32 %opened, 0
  br i1 %closed, label %undo, label %keep
undo:
  call i32 @munmap(ptr %got, i64 %size)
  ret i1 false
keep:
  %ready = add i64 %start, 2097152
  store i64 %ready, ptr @grown
  store i64 %end, ptr @stretch_end
  store ptr %first, ptr @border
  store %room zeroinitializer, ptr %first
  ret i1 true
}

; A room of at least so many bytes behind all others, or of the last one, if it is free, and more;
; null: no memory left.  It is not in the list.  A stretch that is full is left as it is, and another
; set aside.
define internal ptr @grow(i64 %needed) {
entry:
  %border = load ptr, ptr @border
  %nothing = icmp eq ptr %border, null
  br i1 %nothing, label %another, label %known
known:
  %last_at = getelementptr %room, ptr %border, i64 0, i32 1
  %last = load ptr, ptr %last_at
  %alone = icmp eq ptr %last, null
  br i1 %alone, label %begin, label %look
look:
  %free_at = getelementptr %room, ptr %last, i64 0, i32 2
  %free = load i64, ptr %free_at
  %is_free = icmp ne i64 %free, 0
  br label %begin
begin:
  %extends = phi i1 [ false, %known ], [ %is_free, %look ]
  %room = select i1 %extends, ptr %last, ptr %border
  %start = ptrtoint ptr %room to i64
  %end = add i64 %start, %needed
  %with_border = add i64 %end, 64
  %stretch_end = load i64, ptr @stretch_end
  %full = icmp ugt i64 %with_border, %stretch_end
  br i1 %full, label %another, label %check
another:
  %could = call i1 @set_aside(i64 %needed)
  br i1 %could, label %entry.again, label %fail
entry.again:
  %again = call ptr @grow(i64 %needed)
  ret ptr %again
check:
  %grown = load i64, ptr @grown
  %inside = icmp ule i64 %with_border, %grown
  br i1 %inside, label %mark, label %open
open:
  %lifted = add i64 %with_border, 2097151
  %new_grown = and i64 %lifted, -2097152
  %capped = call i64 @llvm.umin.i64(i64 %new_grown, i64 %stretch_end)
  %length = sub i64 %capped, %grown
  %from = inttoptr i64 %grown to ptr
  %opened = call i32 @mprotect(ptr %from, i64 %length, i32 {PROTECTION})
  %closed = icmp ne i32 %opened, 0
  br i1 %closed, label %fail, label %note
note:
  store i64 %capped, ptr @grown
  br label %mark
mark:
  br i1 %extends, label %take_last, label %place
take_last:
  call void @unlink_room(ptr %room)
  %held_at = getelementptr %room, ptr %room, i64 0, i32 3
  %held = load i64, ptr %held_at
  %idle = load i64, ptr @idle_bytes
  %idler = sub i64 %idle, %held
  store i64 %idler, ptr @idle_bytes
  br label %place
place:
  store i64 %needed, ptr %room
  %new_border = inttoptr i64 %end to ptr
  store %room zeroinitializer, ptr %new_border
  %before_at = getelementptr %room, ptr %new_border, i64 0, i32 1
  store ptr %room, ptr %before_at
  store ptr %new_border, ptr @border
  ret ptr %room
fail:
  ret ptr null
}

; --- taking and giving ---

; Take a free room of the list for a request, and leave the rest of it free, if it is of use.
define internal void @occupy(ptr %room, i64 %needed) {
entry:
  call void @unlink_room(ptr %room)
  %bytes = load i64, ptr %room
  %held_at = getelementptr %room, ptr %room, i64 0, i32 3
  %held = load i64, ptr %held_at
  %idle = load i64, ptr @idle_bytes
  %idler = sub i64 %idle, %held
  store i64 %idler, ptr @idle_bytes
  %left = sub i64 %bytes, %needed
  %useless = icmp ult i64 %left, 4096       ; less than a page goes with it
  br i1 %useless, label %done, label %split
split:
  store i64 %needed, ptr %room
  %rest = getelementptr i8, ptr %room, i64 %needed
  store i64 %left, ptr %rest
  %before_at = getelementptr %room, ptr %rest, i64 0, i32 1
  store ptr %room, ptr %before_at
  %next = getelementptr i8, ptr %rest, i64 %left
  %its_at = getelementptr %room, ptr %next, i64 0, i32 1
  store ptr %rest, ptr %its_at
  %its_held = call i64 @llvm.usub.sat.i64(i64 %held, i64 %needed)
  %rest_held_at = getelementptr %room, ptr %rest, i64 0, i32 3
  store i64 %its_held, ptr %rest_held_at
  %now_idle = add i64 %idler, %its_held
  store i64 %now_idle, ptr @idle_bytes
  call void @link_room(ptr %rest)
  br label %done
done:
  ret void
}

; Before %more bytes are held that were not: pages that wait go back to the system, as far as all
; together would be more than what was ever used at once, and some to spare: under a limit, none.
define internal void @stay_within(i64 %more) {
  %idle = load i64, ptr @idle_bytes
  %used = load i64, ptr @used_bytes
  %soon_used = add i64 %used, %more
  %soon = add i64 %soon_used, %idle
  %peak = load i64, ptr @peak_bytes
  %highest = call i64 @llvm.umax.i64(i64 %peak, i64 %soon_used)
  %spare = load i64, ptr @spare
  %allowed = add i64 %highest, %spare
  %excess = call i64 @llvm.usub.sat.i64(i64 %soon, i64 %allowed)
  %fits = icmp eq i64 %excess, 0
  br i1 %fits, label %done, label %release
release:
  call i64 @release_pages(i64 %excess)
  br label %done
done:
  ret void
}

; Memory for at least %bytes; null: none left.  Rooms are some cache lines longer than they need to
; be: tensors that all began at the same place of a page would fight for the same lines.
define ptr @stator_pool_take(i64 %bytes) {
entry:
  %raised = add i64 %bytes, 63
  %whole = and i64 %raised, -64
  %needed = add i64 %whole, 320
  call i32 @pthread_mutex_lock(ptr @mutex)
  %found = call ptr @best_room(i64 %needed)
  %none = icmp eq ptr %found, null
  br i1 %none, label %more, label %reuse
reuse:
  %held_at = getelementptr %room, ptr %found, i64 0, i32 3
  %held = load i64, ptr %held_at
  call void @occupy(ptr %found, i64 %needed)
  %fresh = call i64 @llvm.usub.sat.i64(i64 %needed, i64 %held)
  %known = icmp eq i64 %fresh, 0
  br i1 %known, label %done, label %hold
hold:
  call void @stay_within(i64 %needed)
  br label %done
more:
  %grown = call ptr @grow(i64 %needed)
  %missing = icmp eq ptr %grown, null
  br i1 %missing, label %fail, label %hold_more
hold_more:
  call void @stay_within(i64 %needed)
  br label %done
fail:
  call i32 @pthread_mutex_unlock(ptr @mutex)
  ret ptr null
done:
  %room = phi ptr [ %found, %reuse ], [ %found, %hold ], [ %grown, %hold_more ]
  %total = load i64, ptr %room
  %before = load i64, ptr @used_bytes
  %now = add i64 %before, %total
  store i64 %now, ptr @used_bytes
  %highest = load i64, ptr @peak_bytes
  %new_peak = call i64 @llvm.umax.i64(i64 %now, i64 %highest)
  store i64 %new_peak, ptr @peak_bytes
  call i32 @pthread_mutex_unlock(ptr @mutex)
  %data = getelementptr i8, ptr %room, i64 64
  ret ptr %data
}

; Join a room with the one behind it, which is free and not in the list any more.
define internal void @join_rooms(ptr %room, ptr %next) {
  %bytes = load i64, ptr %room
  %its = load i64, ptr %next
  %all = add i64 %bytes, %its
  store i64 %all, ptr %room
  %held_at = getelementptr %room, ptr %room, i64 0, i32 3
  %held = load i64, ptr %held_at
  %its_held_at = getelementptr %room, ptr %next, i64 0, i32 3
  %its_held = load i64, ptr %its_held_at
  %all_held = add i64 %held, %its_held
  store i64 %all_held, ptr %held_at
  %behind = getelementptr i8, ptr %room, i64 %all
  %before_at = getelementptr %room, ptr %behind, i64 0, i32 1
  store ptr %room, ptr %before_at
  ret void
}

; What torch calls when the last tensor on a room is gone, from whichever thread that happens on.
define void @stator_pool_give(ptr %data, ptr %context) {
entry:
  %room = getelementptr i8, ptr %data, i64 -64
  call i32 @pthread_mutex_lock(ptr @mutex)
  %bytes = load i64, ptr %room
  %idle = load i64, ptr @idle_bytes
  %more = add i64 %idle, %bytes
  store i64 %more, ptr @idle_bytes
  %used = load i64, ptr @used_bytes
  %less = sub i64 %used, %bytes
  store i64 %less, ptr @used_bytes
  %held_at = getelementptr %room, ptr %room, i64 0, i32 3
  store i64 %bytes, ptr %held_at
  %next = getelementptr i8, ptr %room, i64 %bytes
  %next_free_at = getelementptr %room, ptr %next, i64 0, i32 2
  %next_free = load i64, ptr %next_free_at
  %joins_next = icmp ne i64 %next_free, 0
  br i1 %joins_next, label %join_next, label %look_before
join_next:
  call void @unlink_room(ptr %next)
  call void @join_rooms(ptr %room, ptr %next)
  br label %look_before
look_before:
  %before_at = getelementptr %room, ptr %room, i64 0, i32 1
  %before = load ptr, ptr %before_at
  %first = icmp eq ptr %before, null
  br i1 %first, label %link, label %ask_before
ask_before:
  %free_at = getelementptr %room, ptr %before, i64 0, i32 2
  %free = load i64, ptr %free_at
  %joins = icmp ne i64 %free, 0
  br i1 %joins, label %join_before, label %link
join_before:
  call void @unlink_room(ptr %before)
  call void @join_rooms(ptr %before, ptr %room)
  br label %link
link:
  %whole = phi ptr [ %room, %look_before ], [ %room, %ask_before ], [ %before, %join_before ]
  call void @link_room(ptr %whole)
  call i32 @pthread_mutex_unlock(ptr @mutex)
  ret void
}
